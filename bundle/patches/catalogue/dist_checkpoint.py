"""Distributed checkpoints: newer torch and numpy, and what unpickling a file may run."""

import ast
from typing import TYPE_CHECKING

from bundle.patches.entry import NOTHING, Patch, Presence, Replacement

if TYPE_CHECKING:
    from bundle.patches.definitions import Evidence

_WRITE = (
    "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.write_preloaded_data"
)
_COMMON = "megatron.core.dist_checkpointing.strategies.common"
_LOAD = f"{_COMMON}:load_common"
_LOAD_METHOD = f"{_COMMON}:TorchCommonLoadStrategy.load_common"
_LOAD_OBJECTS = f"{_COMMON}:TorchCommonLoadStrategy.load_sharded_objects"

_CHECKPOINTING = "megatron.core.dist_checkpointing"
_COUNTING = {  # the modules that count elements with numpy, and where they do
    "mapping": "ShardedTensor.local_coordinates",
    "validation": "_validate_sharding_for_key_flattened",
    "exchange_utils": "_shard_size",
}
_COUNTS = tuple(f"{_CHECKPOINTING}.{module}:{name}" for module, name in _COUNTING.items())


def _format_unnamed(source: "Evidence") -> Presence:
    write = source[_WRITE]
    if write is None or not write.calls("_write_item"):
        return Presence.UNKNOWN
    if {"SerializationFormat", "serialization_format"} & write.names:
        return Presence.ABSENT
    calls = write.calls("_write_item")
    plain = all(not call.keywords and len(call.args) == 5 for call in calls)
    starred = any(isinstance(arg, ast.Starred) for call in calls for arg in call.args)
    return Presence.PRESENT if plain or starred else Presence.UNKNOWN


def _by_product(source: "Evidence") -> Presence:
    """Whether elements are counted by `numpy.product`, which numpy 2 does not have."""
    counting = [code for code in map(source.__getitem__, _COUNTS) if code is not None]
    if not any(code.calls("product") or code.calls("prod") for code in counting):
        return Presence.UNKNOWN
    return Presence.of(any(code.calls("product") for code in counting))


def _unrestricted(source: "Evidence") -> Presence:
    """Whether any of the loads asks torch to run whatever the file says."""
    loads = [
        call
        for code in (source[_LOAD], source[_LOAD_METHOD], source[_LOAD_OBJECTS])
        for call in (code.calls("load") if code else ())
    ]
    asked = [_asked(call, "weights_only") for call in loads]
    if False in asked:
        return Presence.PRESENT
    return Presence.UNKNOWN if None in asked or not asked else Presence.ABSENT


def _asked(call: ast.Call, name: str) -> bool | None:
    """What a call gives for a flag that is on where it gives nothing; None where that cannot be read."""
    for keyword in call.keywords:
        if keyword.arg is None:
            return None
        if keyword.arg == name:
            value = keyword.value
            return bool(value.value) if isinstance(value, ast.Constant) else None
    return True


PATCHES = (
    Patch(
        id="dist-checkpoint-serialization",
        replacements=(Replacement(_WRITE, "bundle.wrappers.checkpoints:name_the_format", by_signature=True),),
        why="Saving fails with torch 2.8 and later, whose _write_item has one more argument.",
        silent=False,
        upstream="verl-project/verl#6322",
        range="<0.13",
        fixed_in="0.13.0",
        requires=(("torch", ">=2.8"),),
        when=frozenset({"distributed-checkpoint"}),
        assumes=NOTHING,
        evidence=(_WRITE,),
        defect=_format_unnamed,
    ),
    Patch(
        id="dist-checkpoint-numpy-product",
        replacements=tuple(
            Replacement(f"{_CHECKPOINTING}.{module}:np", "bundle.wrappers.checkpoints:with_product")
            for module in _COUNTING
        ),
        why="The first checkpoint fails with numpy 2: module 'numpy' has no attribute 'product'.",
        silent=False,
        upstream="fixed upstream in 0.16; numpy 2.0's release notes list the name as removed",
        range="<0.16",
        fixed_in="0.16.0",
        requires=(("numpy", ">=2"),),
        when=frozenset({"distributed-checkpoint"}),
        assumes=NOTHING,
        evidence=_COUNTS,
        defect=_by_product,
    ),
    Patch(
        id="restricted-unpickle",
        replacements=(
            Replacement(_LOAD, "bundle.wrappers.checkpoints:data_only", optional=True, by_signature=True),
            Replacement(
                _LOAD_METHOD, "bundle.wrappers.checkpoints:data_only", optional=True, by_signature=True
            ),
            Replacement(
                _LOAD_OBJECTS, "bundle.wrappers.checkpoints:data_only", optional=True, by_signature=True
            ),
        ),
        why="Loading a checkpoint runs whatever code its common state holds.",
        silent=True,
        upstream=(
            "fixed upstream in 0.14, back in 0.17.0, fixed again in 0.17.1: by torch's own default, "
            "so that with torch below 2.6 no release is mended"
        ),
        range="<0.17.1,!=0.14.*,!=0.15.*,!=0.16.*",
        fixed_in="0.17.1",
        when=frozenset({"distributed-checkpoint"}),
        assumes=(
            "common state holds nothing but data and Megatron's own classes; others are to be put "
            "among torch's safe globals"
        ),
        evidence=(_LOAD, _LOAD_METHOD, _LOAD_OBJECTS),
        defect=_unrestricted,
    ),
)
