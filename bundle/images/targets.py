"""The targets of the bake file: one for each stack and each base that it is built on."""

from collections.abc import Iterable

from bundle.errors import UsageError
from bundle.frozen import frozen
from bundle.images.definition import Definition


@frozen
class Target:
    """One image: `name` is bake's name for it, which holds no dot."""

    name: str
    stack: str
    base: str
    backend: str


def targets(definition: Definition) -> list[Target]:
    """Every image, in the order of the stacks."""
    return [
        Target(stack.replace(entry.backend, base, 1).replace(".", "-"), stack, base, entry.backend)
        for stack, entry in definition.stacks.items()
        for base in definition.bases_of(stack)
    ]


def chosen(definition: Definition, names: Iterable[str]) -> list[Target]:
    """The targets of these names, all where there is none. Raises UsageError with every unknown name."""
    known = {target.name: target for target in targets(definition)}
    wanted = list(names) or list(known)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise UsageError(f"no target {', '.join(unknown)[:200]}; there are {', '.join(known)}")
    return [known[name] for name in wanted]
