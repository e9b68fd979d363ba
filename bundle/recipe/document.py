"""Read YAML 1.2 from any author: plain values and the line of each key, within limits."""

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer, MaxDepthExceededError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.representer import SafeRepresenter

from bundle.errors import UsageError

MOST_CHARACTERS = 2**20
MAX_DEPTH = 20

KeyPath = tuple[str | int, ...]

_TAG_PREFIX = "tag:yaml.org,2002:"
_NON_TEXT_SCALAR_TAGS = {_TAG_PREFIX + kind for kind in ("null", "bool", "int", "float")}
# Plain words that the resolver singles out and a recipe does not: a date, `=` and `<<` are text here.
_TEXT_TAGS = {_TAG_PREFIX + kind for kind in ("str", "timestamp", "value", "merge")}


@dataclass
class YamlDocument:
    """A mapping, and where each of its keys was written: `places[("train", "steps")]` is "demo.yaml:12"."""

    values: dict[str, Any]
    locations: dict[KeyPath, str] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def find_location(self, path: KeyPath) -> str:
        """Return where `path`, or the nearest mapping around it, was written; empty where neither was."""
        while path and path not in self.locations:
            path = path[:-1]
        return self.locations.get(path, "")


def parse(text: str, origin: str) -> YamlDocument:
    """Return the mapping in `text`; `origin` names it in messages. Raise UsageError for anything else."""
    yaml, node = _compose(text, origin)
    if not isinstance(node, MappingNode):
        raise UsageError(f"{origin}: must hold a mapping of sections (name, model, data, train, ...)")
    document = YamlDocument({})
    document.values = _NodeReader(document, origin, yaml).read_value(node, ())
    return document


def parse_value(text: str, origin: str) -> Any:
    """Return the YAML value in `text`, as after `--set key=`."""
    document = YamlDocument({})
    yaml, node = _compose(text, origin)
    value = None if node is None else _NodeReader(document, origin, yaml).read_value(node, ())
    if document.violations:
        raise UsageError(f"{origin}: cannot be read", document.violations)
    return value


def to_yaml(values: Mapping[str, Any]) -> str:
    """Return YAML that `parse` reads back to `values`, in their order."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _UnprintableQuotingRepresenter
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # declared as None
    stream = io.StringIO()
    yaml.dump(dict(values), stream)
    return stream.getvalue()


class _UnprintableQuotingRepresenter(SafeRepresenter):
    """Quotes what is not printable: unquoted, a line separator (U+0085, U+2028) would be read as a space."""

    def represent_str(self, data: str) -> Any:
        return self.represent_scalar(f"{_TAG_PREFIX}str", data, style=None if data.isprintable() else '"')


_UnprintableQuotingRepresenter.add_representer(str, _UnprintableQuotingRepresenter.represent_str)


class _AliasRefusingComposer(Composer):
    """Composes nodes, but no aliases: a few of them expand without bound."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.parser.check_event(AliasEvent):
            mark = self.parser.peek_event().start_mark
            raise MarkedYAMLError(problem="aliases are not supported", problem_mark=mark)
        return super().compose_node(parent, index)


def _compose(text: str, origin: str) -> tuple[YAML, Node | None]:
    if len(text) > MOST_CHARACTERS:
        raise UsageError(f"{origin}: is longer than {MOST_CHARACTERS} characters")
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer, yaml.max_depth = _AliasRefusingComposer, MAX_DEPTH
    try:
        return yaml, yaml.compose(text)
    except MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        reason = str(error.problem or error.context)
        if isinstance(error, MaxDepthExceededError):
            reason = f"nested deeper than {MAX_DEPTH}"
        raise UsageError(f"{origin}{line}: not YAML that a recipe can contain: {reason}") from error
    except YAMLError as error:
        raise UsageError(f"{origin}: not YAML: {error}") from error


class _NodeReader:
    """Turns nodes into values, noting lines and what is wrong."""

    def __init__(self, document: YamlDocument, origin: str, yaml: YAML) -> None:
        self._document, self._origin, self._yaml = document, origin, yaml

    def read_value(self, node: Node, path: KeyPath) -> Any:
        """Return the value of `node`, which stands under `path`."""
        match node:
            case MappingNode() if node.tag == _TAG_PREFIX + "map":
                return self._read_mapping(node, path)
            case SequenceNode() if node.tag == _TAG_PREFIX + "seq":
                return [self.read_value(item, (*path, index)) for index, item in enumerate(node.value)]
            case ScalarNode() if node.tag in _NON_TEXT_SCALAR_TAGS:
                return self._read_scalar(node, path)
            case ScalarNode() if node.tag in _TEXT_TAGS:
                return self._read_text(node, path)
        self._add_violation(node, path, f"tag {str(node.tag)[:60]} is not supported")
        return None

    def _read_mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, item in node.value:
            if not isinstance(key, ScalarNode):
                self._add_violation(key, path, "a key must be a name")
                continue
            name = str(self._read_text(key, path))
            key_path = (*path, name)
            if name in values:
                first = self._document.find_location(key_path)
                self._add_violation(key, key_path, f"this key is set twice. Remove it here or at {first}")
                continue
            self._document.locations[key_path] = self._locate(key)
            values[name] = self.read_value(item, key_path)
        return values

    def _read_scalar(self, node: ScalarNode, path: KeyPath) -> Any:
        try:
            return self._yaml.constructor.construct_object(node)
        except (ValueError, KeyError):  # such as -_, or five thousand digits
            self._add_violation(
                node, path, f"invalid {str(node.tag).removeprefix(_TAG_PREFIX)}: {node.value[:60]}"
            )
            return None

    def _read_text(self, node: ScalarNode, path: KeyPath) -> str | None:
        text = str(node.value)
        try:
            # JSON writes characters beyond 16 bits as two escapes, which ruamel.yaml reads as two characters.
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            self._add_violation(node, path, "half a surrogate pair is not text")
            return None

    def _locate(self, node: Node) -> str:
        return f"{self._origin}:{node.start_mark.line + 1}"

    def _add_violation(self, node: Node, path: KeyPath, reason: str) -> None:
        name = ".".join(map(str, path))
        self._document.violations.append(f"{self._locate(node)}: {f'{name}: ' if name else ''}{reason}")
