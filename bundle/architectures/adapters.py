"""Low-rank adapters (LoRA: Hu et al., 2021): which weights have one, of which shape and name, as in PEFT.

Beside a frozen published weight W [out, in] stand A [rank, in] and B [out, rank]: the layer computes with
W + alpha / rank * B A. One pair belongs to one published weight, whatever megatron-core joins: a directory of
PEFT (github.com/huggingface/peft) goes in and comes out as it is, and no two weights share an A.

PEFT writes every setting that it has into adapter_config.json. So a key that is not known here is passed over
where it is empty or false, and else refused by its name.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bundle import files
from bundle.architectures.published import Names
from bundle.architectures.tensors import TOWER, Cut, Rule, Tensor, cut, is_expert
from bundle.errors import UsageError, shown

# Norms, routers, biases, embedding and output layer have none; nor have a tower's learned positions and the
# convolution that takes patches.
_ADAPTED = "linear_"
_OF_TOWER_LEFT_OUT = "pos_embed"
ALL = "all-linear"  # as a target, PEFT's word for every one of them
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every published name in WEIGHTS
_READ = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
_DROPOUT = "lora_dropout"
# They say how an adapter is begun, trained or loaded, not what it computes.
_OTHERS = {
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "inference_mode",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "task_type",
}
_MOST = 2**31
# Ways to begin that leave the weights beside the adapter as they were published.
_BEGINNINGS = (None, True, False, "gaussian", "orthogonal", "eva")


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


def published(name: str, shape: Sequence[int], names: Names) -> Tensor:
    """A matrix of this name as an adapter's file has it: beside a module of transformers'."""
    return Tensor(name, tuple(shape), (f"{PREFIX}{names.in_memory(name)}",), Rule("copy", tuple(shape[:1])))


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
        of_rows = how._replace(blocks=(1,)) if how and how.dim == 0 else None
        of_columns = how if how and how.dim == 1 else None
        found.append(
            Pair(
                Matrix(f"{module}.lora_A.weight", (rank, columns), of_columns, expert),
                Matrix(f"{module}.lora_B.weight", (rows, rank), of_rows, expert),
            )
        )
    return tuple(found) if any(found) else ()


def adaptable(tensor: Tensor) -> bool:
    """Whether a tensor is a linear layer's weight that somebody publishes as one tensor."""
    _, module, kind = ("", *tensor.name.rsplit(".", 2))[-3:]
    if tensor.name.startswith(TOWER):
        return kind == "weight" and len(tensor.shape) == 2 and module != _OF_TOWER_LEFT_OUT
    ours = kind == "weight" and module.startswith(_ADAPTED)
    return ours and bool(tensor.published) and tensor.stack is None


def is_target(module: str, target: str) -> bool:
    """Whether a published module's name is, or ends with, what a target names."""
    return module == target or module.endswith(f".{target}")


def unmatched(table: Iterable[Tensor], targets: Sequence[str]) -> list[str]:
    """The targets that no weight of a model has."""
    modules = _modules(table)
    return [target for target in targets if not any(is_target(module, target) for module in modules)]


def projections(table: Iterable[Tensor]) -> list[str]:
    """What the names of all modules that can have an adapter end with, and no other's: as short as can be.

    That is `q_proj`, but `attn.proj` beside a convolution `patch_embed.proj`, and `mlp.0` beside a block
    `blocks.0`: PEFT refuses a directory whose targets name anything but a layer.
    """
    tensors = list(table)
    modules = _modules(tensors)
    every = {module for tensor in tensors for name in tensor.published for module in _around(name)}
    others = {end for module in every - modules for end in _ends(module)}
    return sorted({next(end for end in _ends(module) if end not in others) for module in modules})


def _around(name: str) -> Iterator[str]:
    """The modules that a tensor is in, by their names."""
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))


def _ends(module: str) -> Iterator[str]:
    """What a module's name ends with, the shortest first."""
    parts = module.split(".")
    return (".".join(parts[at:]) for at in reversed(range(len(parts))))


def _modules(table: Iterable[Tensor]) -> set[str]:
    return {
        name.removesuffix(".weight") for tensor in table if adaptable(tensor) for name in tensor.published
    }


def read(directory: Path) -> dict[str, Any]:
    """Return rank, alpha, targets and dropout. Raise UsageError with all that is not computed here."""
    path = directory / CONFIG
    said = files.json_object(path, "model.lora.path must be a directory of PEFT")
    refused = []
    if said.get("peft_type") != "LORA":
        refused.append(f"peft_type {shown(said.get('peft_type'))}: only LORA is computed")
    if said.get("init_lora_weights") not in _BEGINNINGS:
        way = shown(said["init_lora_weights"])
        refused.append(f"init_lora_weights {way}: it changes the weights beside the adapter")
    if said.get("bias", "none") != "none":
        refused.append(f"bias {shown(said['bias'])}: biases are not trained here")
    refused += [f"{key}: missing" for key in _READ if said.get(key) is None]
    refused += _unfit(said)
    known = {*_READ, *_OTHERS, _DROPOUT, "peft_type", "init_lora_weights", "bias"}
    refused += [
        f"{files.printable(key)[:60]} {shown(value)}: is not computed here"
        for key, value in said.items()
        if key not in known and not _nothing(value)
    ]
    if refused:
        raise UsageError(f"{path}: not an adapter that can be trained on", refused)
    found = {ours: said[theirs] for theirs, ours in _READ.items()}
    return found | {
        "targets": sorted(found["targets"]),
        "alpha": float(found["alpha"]),
        "dropout": float(said.get(_DROPOUT) or 0),
    }


def _unfit(said: Mapping[str, Any]) -> Iterator[str]:
    """What PEFT's files say of rank, alpha, targets and dropout with a value that cannot be one."""
    rank, alpha, targets = (said.get(key) for key in _READ)
    if rank is not None and not (type(rank) is int and rank > 0):
        yield f"r {shown(rank)}: must be a whole number above 0"
    if alpha is not None and not (type(alpha) in (int, float) and 0 < alpha < _MOST):
        yield f"lora_alpha {shown(alpha)}: must be a number above 0"
    dropout = said.get(_DROPOUT)
    if dropout is not None and not (type(dropout) in (int, float) and 0 <= dropout < 1):
        yield f"{_DROPOUT} {shown(dropout)}: must be a number from 0 and below 1"
    if isinstance(targets, str):
        yield "target_modules: a pattern; name the modules in model.lora.targets"
    elif targets is not None and not (
        isinstance(targets, list) and targets and all(isinstance(each, str) and each for each in targets)
    ):
        yield f"target_modules {shown(targets)}: must be a list of modules' names"


def config(
    rank: int, alpha: float, dropout: float, targets: Sequence[str], base: str | None
) -> Mapping[str, Any]:
    """What an adapter_config.json says of such adapters of the model in the directory `base`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        _DROPOUT: dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _nothing(value: Any) -> bool:
    """Empty and false values, and mappings of such: {"": 0} says no more than {}."""
    return not (any(value.values()) if isinstance(value, dict) else value)
