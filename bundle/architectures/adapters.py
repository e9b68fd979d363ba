"""Low-rank adapters (LoRA: Hu et al., 2021): which weights have one, of which shape and name, as in PEFT.

Beside a frozen published weight W [out, in] stand A [rank, in] and B [out, rank]: the layer computes with
W + alpha / rank * B A. One pair belongs to one published weight, whatever megatron-core joins: a directory of
PEFT goes in and comes out as it is, and no two weights share an A.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bundle.architectures.tensors import Cut, Tensor, cut, is_expert

# Norms, routers, biases, embedding and output layer have none.
_ADAPTED = "linear_"


class Matrix(NamedTuple):
    """A or B of one weight: its name and shape in the whole model, and how ranks cut it."""

    name: str
    shape: tuple[int, int]
    cut: Cut | None
    expert: bool


class Pair(NamedTuple):
    """The adapter of one published weight."""

    a: Matrix
    b: Matrix


def pairs(tensor: Tensor, targets: Sequence[str], rank: int) -> tuple[Pair | None, ...]:
    """The adapter of each published weight that a tensor is made of, None for one that has none.

    () where no one has. A weight's module is a target if its published name is one, or ends with `.` and one
    (`q_proj`, `self_attn.q_proj`), as in PEFT. What is cut of W by rows is cut of B, by columns of A: a part
    of W's rows is a part of each published weight's rows, in whatever order ours has them.
    """
    if not adaptable(tensor):
        return ()
    how, expert = cut(tensor.name), is_expert(tensor.name)
    found: list[Pair | None] = []
    for name, (rows, columns) in tensor.published_shapes():
        module = name.removesuffix(".weight")
        if not any(is_target(module, target) for target in targets):
            found.append(None)
            continue
        of_rows = how._replace(blocks=1) if how and how.dim == 0 else None
        of_columns = how if how and how.dim == 1 else None
        found.append(
            Pair(
                Matrix(f"{module}.lora_A.weight", (rank, columns), of_columns, expert),
                Matrix(f"{module}.lora_B.weight", (rows, rank), of_rows, expert),
            )
        )
    return tuple(found) if any(found) else ()


def adaptable(tensor: Tensor) -> bool:
    """Whether a tensor is a projection's weight that somebody publishes."""
    _, module, kind = ("", *tensor.name.rsplit(".", 2))[-3:]
    return kind == "weight" and module.startswith(_ADAPTED) and bool(tensor.published)


def is_target(module: str, target: str) -> bool:
    """Whether a published module's name is, or ends with, what a target names."""
    return module == target or module.endswith(f".{target}")


def unmatched(table: Iterable[Tensor], targets: Sequence[str]) -> tuple[list[str], list[str]]:
    """The targets that no weight of a model has, and the last parts of the names that there are."""
    modules = {
        name.removesuffix(".weight") for tensor in table if adaptable(tensor) for name in tensor.published
    }
    missing = [target for target in targets if not any(is_target(module, target) for module in modules)]
    return missing, sorted({module.rpartition(".")[2] for module in modules})
