"""Reading YAML that anybody may have written: plain values with the line of each, within limits."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml

from bundle.errors import UsageError

LARGEST_TEXT = 2**20
DEEPEST = 20

Path = tuple[str | int, ...]

# YAML 1.2's plain scalars: PyYAML knows 1.1, where 1e-3 is a string, 010 is eight and 1:30 is ninety.
FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
SCALARS: tuple[tuple[str, re.Pattern[str], Callable[[str], Any]], ...] = (
    ("null", re.compile(r"~|null|Null|NULL|"), lambda text: None),
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    ("int", re.compile(r"[-+]?(0|[1-9][0-9]{0,18})"), int),
    ("float", FLOAT, lambda text: float(re.sub(r"\.(?=[iInN])", "", text))),
)


@dataclass
class Document:
    """A mapping, and where each of its keys was written: `places[("train", "steps")]` is "demo.yaml:12"."""

    values: dict[str, Any]
    places: dict[Path, str] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def place(self, path: Path) -> str:
        """Where `path`, or the nearest mapping around it, was written; empty when nobody wrote it."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, "")


class _Composer(yaml.SafeLoader):
    """Composes nodes, refusing aliases (a few of them expand without bound) and deep nesting on the way."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="aliases are not supported", problem_mark=self.peek_event().start_mark
            )
        self.depth += 1
        if self.depth > DEEPEST:
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {DEEPEST}", problem_mark=mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def parse(text: str, origin: str) -> Document:
    """The mapping that `text` holds; `origin` names it in messages. Raises UsageError for anything else."""
    node = _compose(text, origin)
    if not isinstance(node, yaml.MappingNode):
        raise UsageError(f"{origin}: must hold a mapping of sections (name, model, data, train, ...)")
    document = Document({})
    document.values = _Walk(document, origin).value(node, ())
    return document


def parse_value(text: str, origin: str) -> Any:
    """The YAML value in `text`, as after `--set key=`."""
    document = Document({})
    node = _compose(text, origin)
    value = None if node is None else _Walk(document, origin).value(node, ())
    if document.violations:
        raise UsageError(f"{origin}: cannot be read", document.violations)
    return value


def _compose(text: str, origin: str) -> Any:
    if len(text) > LARGEST_TEXT:
        raise UsageError(f"{origin}: longer than {LARGEST_TEXT} characters")
    try:
        loader = _Composer(text)
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UsageError(
            f"{origin}{line}: not YAML that we read: {error.problem or error.context}"
        ) from error
    except yaml.YAMLError as error:
        raise UsageError(f"{origin}: not YAML: {error}") from error


class _Walk:
    """Turns nodes into values, noting lines and what is wrong."""

    def __init__(self, document: Document, origin: str) -> None:
        self._document, self._origin = document, origin

    def value(self, node: yaml.Node, path: Path) -> Any:
        """The value of `node`, which stands under `path`."""
        if node.tag.startswith("tag:yaml.org,2002:python") or node.tag.startswith("!"):
            self._refuse(node, path, f"tag {node.tag[:60]} is not supported")
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        try:
            return _scalar(node)
        except UnicodeDecodeError:
            self._refuse(node, path, "half a surrogate pair is no text")
            return None

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, item in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._refuse(key, path, "a key must be a name")
                continue
            name = str(self.value(key, path)) if key.style else str(key.value)
            here = (*path, name)
            if name in values:
                self._refuse(key, here, f"given twice, first at {self._document.place(here)}")
                continue
            self._document.places[here] = self._at(key)
            values[name] = self.value(item, here)
        return values

    def _at(self, node: yaml.Node) -> str:
        return f"{self._origin}:{node.start_mark.line + 1}"

    def _refuse(self, node: yaml.Node, path: Path, why: str) -> None:
        name = ".".join(map(str, path))
        self._document.violations.append(f"{self._at(node)}: {f'{name}: ' if name else ''}{why}")


def _scalar(node: yaml.Node) -> Any:
    text = str(node.value)
    if node.style is None:  # type: ignore[attr-defined]  # neither quoted nor a block
        for _, pattern, convert in SCALARS:
            if pattern.fullmatch(text):
                return convert(text)
    # JSON writes characters beyond 16 bits as two escapes, which YAML reads as two characters.
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16")
