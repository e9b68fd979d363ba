"""The names of `bundle/` against docs/style.md: `python -m tools.names`, which `make lint` runs.

Names that break a rule today stand in tools/names.txt, which only shrinks: `python -m tools.names shrink`.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from bundle import files
from bundle.errors import BundleError, UsageError
from tools.command import run

EXCEPTIONS = Path(__file__).with_suffix(".txt")


def _read_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Identifiers that say nothing of what they hold.
FILLERS = _read_words(
    "asked beside each found given held here kept made of others own said some spoken there these told"
    " wanted what whole"
)
# Prepositions and question words. `from_x` and `to_x` convert, `with_x` copies, `as_x` is a library's manner.
PARTICLES = _read_words(
    "about above across after against among around at before behind below beneath beside between beyond by"
    " during for how in inside into of off on onto out outside over per since through under until upon what"
    " when where whether which who whom whose why within without"
)
# Participles that do not end in -ed. `read`, `set`, `put`, `split`, `cut` and `run` are verbs as well.
IRREGULAR = _read_words(
    "been begun bought broken brought built caught chosen done drawn driven fallen felt forgotten found given"
    " gone got grown held heard hidden hung kept known laid left lent lost made meant met paid proven said"
    " seen sent shown spent spoken stood taken taught thought told torn understood won worn woven written"
)
# Verbs that end in -ed, as participles do.
VERBS = _read_words("embed exceed feed heed need proceed seed shed speed succeed")
# Functions that torch, Megatron or Transformer Engine call by their name.
HOOKS = _read_words(
    "elapsed_time fused_permute fused_permute_with_probs fused_sort_chunks_by_index"
    " fused_sort_chunks_by_index_with_probs fused_unpermute sharded_state_dict"
)


class Violation(NamedTuple):
    """One name that breaks one rule: what an exception names."""

    path: str  # of the file, below the checkout
    kind: str  # function, identifier or class
    name: str


def is_verb_phrase(name: str) -> bool:
    """Return False for a participle, a question word or a preposition at the start of a function's name."""
    first = name.strip("_").split("_")[0].lower()
    if first in PARTICLES or first in IRREGULAR:
        return False
    return first in VERBS or not re.fullmatch(r"[a-z]{3,}ed", first)


def find_violations(root: Path) -> dict[Violation, list[int]]:
    """Return the lines of every name under `root`/bundle that breaks a rule."""
    lines: dict[Violation, list[int]] = defaultdict(list)
    owners: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for file in sorted((root / "bundle").rglob("*.py")):
        path = file.relative_to(root).as_posix()
        if file.stem in FILLERS:
            lines[Violation(path, "identifier", file.stem)].append(1)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _breaks_verb_rule(node):
                lines[Violation(path, "function", node.name)].append(node.lineno)
            elif isinstance(node, ast.ClassDef):
                owners[node.name].append((path, node.lineno))
            for name, line in _read_identifiers(node):
                if name.strip("_") in FILLERS:
                    lines[Violation(path, "identifier", name)].append(line)
    for name, places in owners.items():
        if len({path for path, _ in places}) > 1:
            for path, line in places:
                lines[Violation(path, "class", name)].append(line)
    return lines


def _breaks_verb_rule(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    is_property = any("property" in ast.dump(decorator) for decorator in node.decorator_list)
    if node.name.startswith("__") or node.name in HOOKS or is_property:
        return False
    return not is_verb_phrase(node.name)


def _read_identifiers(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the names that a node gives to something, but for a function's, which has a rule of its own."""
    if isinstance(node, ast.arg):
        yield node.arg, node.lineno
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id, node.lineno
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr, node.lineno
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        if node.name:
            yield node.name, node.lineno
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        if is_verb_phrase(node.name):
            yield node.name, node.lineno
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((alias.asname, alias.lineno) for alias in node.names if alias.asname)


def read_exceptions(file: Path) -> Counter[Violation]:
    """Return how often each exception may occur. Raise UsageError for a line of another form."""
    allowed: Counter[Violation] = Counter()
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        match line.split():
            case [path, kind, name, count] if count.isdigit():
                allowed[Violation(path, kind, name)] = int(count)
            case _:
                raise UsageError(
                    f"{file.name}:{number}: {line!r} is not PATH KIND NAME COUNT. Restore the line."
                )
    return allowed


def check_names(lines: dict[Violation, list[int]], allowed: Counter[Violation]) -> list[str]:
    """Return a message for every new violation and for every exception that occurs less often."""
    remedies = {
        "function": "is not a verb phrase. Name it as find_, read_, build_ or check_ would",
        "identifier": "says nothing of its value. Use a noun for what it is",
        "class": "has another owner in the package. Choose a name of its own",
    }
    messages = []
    for violation in sorted(lines.keys() | allowed.keys()):
        path, kind, name = violation
        count, limit = len(lines.get(violation, ())), allowed[violation]
        if count > limit:
            places = ", ".join(map(str, sorted(lines[violation])))
            messages.append(f"{path}:{places}: {kind} {name} {remedies[kind]} ({count}, {limit} allowed).")
        elif count < limit:
            messages.append(
                f"names.txt: {path} {kind} {name} occurs {count} times, not {limit}."
                " Run: python -m tools.names shrink"
            )
    return messages


def shrink_exceptions(lines: dict[Violation, list[int]], allowed: Counter[Violation]) -> Counter[Violation]:
    """Return the exceptions that still occur, each as often as it occurs; never one more."""
    return Counter({v: min(count, len(lines[v])) for v, count in allowed.items() if v in lines})


def write_exceptions(file: Path, allowed: Counter[Violation]) -> None:
    """Write the exceptions, sorted, one a line."""
    files.write_text(file, "".join(f"{' '.join(v)} {count}\n" for v, count in sorted(allowed.items())))


app = typer.Typer(rich_markup_mode=None, add_completion=False, help=__doc__)
Root = Annotated[Path, typer.Option("--root", help="The checkout to read. Default: the working directory.")]
File = Annotated[Path, typer.Option("--exceptions", help="The list of exceptions. Default: tools/names.txt.")]


@app.callback(invoke_without_command=True)
def check(context: typer.Context, root: Root = Path(), exceptions: File = EXCEPTIONS) -> None:
    """Fail on every name that breaks a rule and is not an exception."""
    if context.invoked_subcommand is None:
        messages = check_names(find_violations(root), read_exceptions(exceptions))
        if messages:
            raise BundleError(f"{len(messages)} names or exceptions are wrong (docs/style.md).", messages)


@app.command()
def shrink(root: Root = Path(), exceptions: File = EXCEPTIONS) -> None:
    """Remove the exceptions that no longer occur; add none."""
    write_exceptions(exceptions, shrink_exceptions(find_violations(root), read_exceptions(exceptions)))


if __name__ == "__main__":
    run(app, "tools.names")
