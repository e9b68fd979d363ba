"""Say which weights have low-rank adapters (LoRA: Hu et al., 2021), of which shape and name, as in PEFT.

A frozen published weight W [out, in] has A [rank, in] and B [out, rank]: the layer computes with W + alpha /
rank * B A. One pair belongs to one published weight, even where megatron-core joins several weights. A
directory of PEFT (github.com/huggingface/peft) is therefore written as it was read, and no two weights share
an A.

PEFT writes all of its settings into adapter_config.json. A key that is not known here is ignored where it is
empty or false, and else refused by its name.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bundle import files
from bundle.architectures.published_names import PublishedNames
from bundle.architectures.tensors import TOWER_PREFIX, ConversionRule, Cut, Tensor, find_cut, is_expert
from bundle.errors import UsageError, format_value

# Norms, routers, biases, embedding and output layer have none; nor have a tower's learned positions and the
# convolution that takes patches.
_MEGATRON_LINEAR_PREFIX = "linear_"
_TOWER_POSITION_EMBEDDING_MODULE = "pos_embed"
ALL_LINEAR = "all-linear"  # as a target, PEFT's word for every one of them
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
NAME_PREFIX = "base_model.model."  # of every published name in WEIGHTS
_FIELD_BY_PEFT_KEY = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
_DROPOUT_KEY = "lora_dropout"
SUPPORTED_VARIANT_FLAGS = (
    "use_rslora",
    "use_dora",
)  # change what adapters compute; false where a file has none
# These keys say how an adapter is initialized, trained or loaded, not what it computes.
_IGNORED_KEYS = {
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
_LARGEST_ALPHA = 2**31
# Initializations that leave the weights beside the adapter as they were published.
_SUPPORTED_LORA_INITS = (None, True, False, "gaussian", "orthogonal", "eva")


class LoraMatrix(NamedTuple):
    """A, B or magnitude of one weight: its name and shape in the whole model, and how ranks cut it."""

    name: str
    shape: tuple[int, ...]
    cut: Cut | None
    is_expert: bool


class Pair(NamedTuple):
    """The adapter of one published weight; `magnitude` is DoRA's."""

    a: LoraMatrix
    b: LoraMatrix
    magnitude: LoraMatrix | None = None

    def list_trained_matrices(self) -> tuple[LoraMatrix, ...]:
        """Return all that is trained of the adapter."""
        return (self.a, self.b) if self.magnitude is None else (self.a, self.b, self.magnitude)


def build_adapter_tensor(name: str, shape: Sequence[int], names: PublishedNames) -> Tensor:
    """Return a matrix of this name as in an adapter's file, which names it by a module of transformers."""
    return Tensor(
        name,
        tuple(shape),
        (f"{NAME_PREFIX}{names.to_transformers_name(name)}",),
        ConversionRule("copy", tuple(shape[:1])),
    )


def build_adapter_pairs(
    tensor: Tensor, targets: Sequence[str], rank: int, *, use_dora: bool = False
) -> tuple[Pair | None, ...]:
    """Return the adapter of each published weight that a tensor is made of; None for one without an adapter.

    Return () where no weight has one. A weight's module is a target if its published name is one, or ends
    with `.` and one (`q_proj`, `self_attn.q_proj`), as in PEFT.

    Where W is cut by rows, B and the magnitude are too; where W is cut by columns, A is. A part of W's rows
    is a part of each published weight's rows, in any order of ours.
    """
    if not is_adaptable(tensor):
        return ()
    weight_cut, expert = find_cut(tensor.name), is_expert(tensor.name)
    weight_pairs: list[Pair | None] = []
    for name, (rows, columns) in tensor.list_published_shapes():
        module = name.removesuffix(".weight")
        if not any(is_target(module, target) for target in targets):
            weight_pairs.append(None)
            continue
        row_cut = weight_cut._replace(blocks=(1,)) if weight_cut and weight_cut.dim == 0 else None
        column_cut = weight_cut if weight_cut and weight_cut.dim == 1 else None
        weight_pairs.append(
            Pair(
                LoraMatrix(f"{module}.lora_A.weight", (rank, columns), column_cut, expert),
                LoraMatrix(f"{module}.lora_B.weight", (rows, rank), row_cut, expert),
                LoraMatrix(f"{module}.lora_magnitude_vector", (rows,), row_cut, expert) if use_dora else None,
            )
        )
    return tuple(weight_pairs) if any(weight_pairs) else ()


def is_adaptable(tensor: Tensor) -> bool:
    """Return whether a tensor is a linear layer's weight that is published as one tensor."""
    _, module, kind = ("", *tensor.name.rsplit(".", 2))[-3:]
    if tensor.name.startswith(TOWER_PREFIX):
        return kind == "weight" and len(tensor.shape) == 2 and module != _TOWER_POSITION_EMBEDDING_MODULE
    is_linear_weight = kind == "weight" and module.startswith(_MEGATRON_LINEAR_PREFIX)
    return is_linear_weight and bool(tensor.published_names) and tensor.stack is None


def is_target(module: str, target: str) -> bool:
    """Return whether a published module's name is the target, or ends with it."""
    return module == target or module.endswith(f".{target}")


def find_unmatched_targets(table: Iterable[Tensor], targets: Sequence[str]) -> list[str]:
    """Return the targets that no weight of a model matches."""
    modules = _find_adaptable_modules(table)
    return [target for target in targets if not any(is_target(module, target) for module in modules)]


def list_shortest_linear_suffixes(table: Iterable[Tensor]) -> list[str]:
    """Return the shortest endings of the names of all modules that can have an adapter, and of no others.

    That is `q_proj`, but `attn.proj` where there is a convolution `patch_embed.proj`, and `mlp.0` where there
    is a block `blocks.0`. PEFT refuses a directory whose targets name anything but a layer.
    """
    tensors = list(table)
    modules = _find_adaptable_modules(tensors)
    all_modules = {
        module
        for tensor in tensors
        for name in tensor.published_names
        for module in _list_module_prefixes(name)
    }
    other_endings = {
        ending for module in all_modules - modules for ending in _list_module_name_suffixes(module)
    }
    return sorted(
        {
            next(ending for ending in _list_module_name_suffixes(module) if ending not in other_endings)
            for module in modules
        }
    )


def _list_module_prefixes(name: str) -> Iterator[str]:
    """Return the names of the modules that contain a tensor."""
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))


def _list_module_name_suffixes(module: str) -> Iterator[str]:
    """Return the endings of a module's name, the shortest first."""
    parts = module.split(".")
    return (".".join(parts[start:]) for start in reversed(range(len(parts))))


def _find_adaptable_modules(table: Iterable[Tensor]) -> set[str]:
    return {
        name.removesuffix(".weight")
        for tensor in table
        if is_adaptable(tensor)
        for name in tensor.published_names
    }


def read_lora_settings(directory: Path) -> dict[str, Any]:
    """Return rank, alpha, targets, dropout and flags. Raise UsageError with all that is not computed here."""
    path = directory / CONFIG_FILE
    settings = files.read_json_object(path, "model.lora.path must be a directory in PEFT's format")
    refused = []
    if settings.get("peft_type") != "LORA":
        refused.append(f"peft_type {format_value(settings.get('peft_type'))}: only LORA is supported")
    if settings.get("init_lora_weights") not in _SUPPORTED_LORA_INITS:
        init_method = format_value(settings["init_lora_weights"])
        refused.append(f"init_lora_weights {init_method}: changes the base weights, which is not supported")
    if settings.get("bias", "none") != "none":
        refused.append(f"bias {format_value(settings['bias'])}: training biases is not supported")
    refused += [f"{key}: missing" for key in _FIELD_BY_PEFT_KEY if settings.get(key) is None]
    refused += _describe_invalid_setting_values(settings)
    known = {*_FIELD_BY_PEFT_KEY, *_IGNORED_KEYS, _DROPOUT_KEY, *SUPPORTED_VARIANT_FLAGS}
    known |= {"peft_type", "init_lora_weights", "bias"}
    refused += [
        f"{files.to_printable(key)[:60]} {format_value(value)}: not supported"
        for key, value in settings.items()
        if key not in known and not _is_empty_or_all_falsy(value)
    ]
    if refused:
        raise UsageError(f"{path}: training cannot start from this adapter", refused)
    values = {field: settings[peft_key] for peft_key, field in _FIELD_BY_PEFT_KEY.items()}
    return values | {
        "targets": sorted(values["targets"]),
        "alpha": float(values["alpha"]),
        "dropout": float(settings.get(_DROPOUT_KEY) or 0),
        **{flag: bool(settings.get(flag)) for flag in SUPPORTED_VARIANT_FLAGS},
    }


def _describe_invalid_setting_values(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings in PEFT's files that have an invalid value."""
    rank, alpha, targets = (settings.get(key) for key in _FIELD_BY_PEFT_KEY)
    if rank is not None and not (type(rank) is int and rank > 0):
        yield f"r {format_value(rank)}: must be a whole number above 0"
    if alpha is not None and not (type(alpha) in (int, float) and 0 < alpha < _LARGEST_ALPHA):
        yield f"lora_alpha {format_value(alpha)}: must be a number above 0"
    dropout = settings.get(_DROPOUT_KEY)
    if dropout is not None and not (type(dropout) in (int, float) and 0 <= dropout < 1):
        yield f"{_DROPOUT_KEY} {format_value(dropout)}: must be a number from 0 and below 1"
    for flag in SUPPORTED_VARIANT_FLAGS:
        if not isinstance(settings.get(flag), bool | None):
            yield f"{flag} {format_value(settings[flag])}: must be true or false"
    if isinstance(targets, str):
        yield "target_modules: a pattern is not supported; name the modules in model.lora.targets"
    elif targets is not None and not (
        isinstance(targets, list)
        and targets
        and all(isinstance(target, str) and target for target in targets)
    ):
        yield f"target_modules {format_value(targets)}: must be a list of module names"


def build_adapter_config(values: Mapping[str, Any], base: str | None) -> Mapping[str, Any]:
    """Return the content of an adapter_config.json for adapters of the model in the directory `base`.

    `values` has at least what `read_lora_settings` returns.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": values["rank"],
        "lora_alpha": values["alpha"],
        "target_modules": list(values["targets"]),
        _DROPOUT_KEY: values["dropout"],
        **{flag: values[flag] for flag in SUPPORTED_VARIANT_FLAGS},
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _is_empty_or_all_falsy(value: Any) -> bool:
    """Return whether a value is empty or false, or a mapping of such: {"": 0} says as much as {}."""
    return not (any(value.values()) if isinstance(value, dict) else value)
