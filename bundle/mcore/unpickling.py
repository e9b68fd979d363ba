"""Reading of pickles from untrusted sources: data only, whatever they ask for."""

import argparse
import enum
import io
import os
import pathlib
import pickle
import pickletools
import signal
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

# Modules whose own classes hold numbers and names: the index of torch's distributed checkpoints, and FP8
# recipes in the extra state of Transformer Engine's layers.
_ALLOWED_CLASS_MODULES = ("torch.distributed.checkpoint.metadata", "transformer_engine.common.recipe")
_ALLOWED_NAMES = {
    ("builtins", "set"),
    ("collections", "OrderedDict"),
    ("_io", "BytesIO"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.planner", "SavePlan"),
    ("torch.distributed.checkpoint.planner", "WriteItem"),
    ("torch.distributed.checkpoint.planner", "WriteItemType"),
    ("torch.distributed.checkpoint.planner", "TensorWriteData"),
    ("torch.distributed.checkpoint.planner", "BytesIOWriteData"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
    # Megatron's class that derives from Transformer Engine's delayed recipe and holds its settings.
    ("megatron.core.extensions.transformer_engine", "TEDelayedScaling"),
    ("torch.serialization", "_get_layout"),  # looks a layout up by its name
    # A tensor; its bytes go through torch.load, which unpickles data only as well.
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.storage", "_load_from_bytes"),
}
_MEMO_PUT_OPCODES = ("PUT", "LONG_BINPUT")  # under a number that the pickle says
_MISSING_ATTRIBUTE = object()
_TORCH_CONSTANT_TYPES = (torch.dtype, torch.layout, torch.memory_format)
# If two restrictions overlapped, the first to end would lift the other's, and the last would never be lifted.
_RESTRICTION_LOCK = threading.RLock()


@contextmanager
def restrict_to_data() -> Iterator[None]:
    """Restrict unpickling in the block to data: a pickle with anything else raises UnpicklingError.

    A checkpoint may come from anyone, and unpickling it freely runs any code in it. The restriction holds for
    `pickle.load`, `pickle.loads` and `torch.load` of the whole process, threads with which torch reads
    included. Its collectives unpickle in other ways. A second thread waits.
    """
    with force_weights_only_load():
        before = pickle.load, pickle.loads
        pickle.load, pickle.loads = _load, _loads
        try:
            yield
        finally:
            pickle.load, pickle.loads = before


@contextmanager
def force_weights_only_load() -> Iterator[None]:
    """Restrict `torch.load` in the block to data, with the classes that Megatron writes into common.pt.

    It overrules `weights_only=False`. A second thread waits.
    """
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    with _RESTRICTION_LOCK, torch.serialization.safe_globals(_list_common_pt_classes()):
        before = os.environ.get(name)
        os.environ[name] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


def _list_common_pt_classes() -> list[Any]:
    from megatron.core.enums import ModelType
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.rerun_state_machine import RerunDiagnostic, RerunMode, RerunState
    from megatron.core.transformer.enums import AttnBackend

    standard = [argparse.Namespace, io.BytesIO, pathlib.PosixPath, signal.Signals, types.SimpleNamespace]
    ours = [AttnBackend, ModelType, OptimizerConfig, RerunDiagnostic, RerunMode, RerunState]
    return [*standard, *ours, (_get_enum_member, "builtins.getattr")]


def _get_enum_member(owner: Any, name: Any) -> Any:
    """Return a member of an enum, which Python 3.11.2 pickles as getattr(class, name).

    Raise UnpicklingError for any other attribute.
    """
    if isinstance(owner, type) and issubclass(owner, enum.Enum) and name in list(owner.__members__):
        return owner.__members__[name]
    raise pickle.UnpicklingError(f"it loads {name!r} of {owner!r}, which is not data and could run code")


class _DataUnpickler(pickle.Unpickler):
    """An unpickler for data that also refuses changes of classes.

    Pickles can set attributes of the classes that they name, which all of the process shares.
    """

    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(file, **options)
        self._originals: dict[int, tuple[Any, dict[str, Any]]] = {}  # by id: what was given, and how it was

    def load(self) -> Any:
        try:
            loaded = super().load()
        finally:
            changed = [
                name
                for owner, original in self._originals.values()
                for name in _restore_attributes(owner, original)
            ]
        if changed:
            raise pickle.UnpicklingError(f"it changes {', '.join(changed)}, which data does not do")
        return loaded

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(attribute := getattr(torch, name, None), _TORCH_CONSTANT_TYPES):
            return attribute
        if (module, name) == ("builtins", "getattr"):
            return _get_enum_member
        if module in _ALLOWED_CLASS_MODULES:
            attribute = vars(import_module(module)).get(name)
            if isinstance(attribute, type) and attribute.__module__ == module:
                return self._record_original_attributes(attribute)
        if (module, name) in _ALLOWED_NAMES:
            attribute = super().find_class(module, name)
            return (
                self._record_original_attributes(attribute)
                if isinstance(attribute, type)
                else lambda *arguments: attribute(*arguments)
            )
        raise pickle.UnpicklingError(f"it loads {module}.{name}, which is not data and could run code")

    def _record_original_attributes(self, cls: type) -> type:
        for owner in (cls, *(cls if issubclass(cls, enum.Enum) else ())):
            self._originals.setdefault(id(owner), (owner, dict(vars(owner))))
        return cls


def _restore_attributes(owner: Any, original: dict[str, Any]) -> list[str]:
    """Restore the attributes that have changed, and return their names; pydantic makes its own late."""
    now = vars(owner)
    names = [name for name in now.keys() | original.keys() if not name.startswith("__pydantic")]
    changed = [
        name
        for name in names
        if now.get(name, _MISSING_ATTRIBUTE) is not original.get(name, _MISSING_ATTRIBUTE)
    ]
    for name in changed:
        if name in original:
            setattr(owner, name, original[name])
        else:
            delattr(owner, name)
    return [f"{name} of {owner}" for name in changed]


def _load(file: Any, **options: Any) -> Any:
    _refuse_large_allocations(file)
    return _DataUnpickler(file, **options).load()


def _loads(content: Any, **options: Any) -> Any:
    return _load(io.BytesIO(content), **options)


def _refuse_large_allocations(file: Any) -> None:
    """Raise UnpicklingError where a length, or the number of a remembered object, is beyond the file.

    It reads a pickle's instructions and follows none: a few bytes of them can ask for all memory.
    """
    start = file.tell()
    try:
        for instruction, number, _ in pickletools.genops(file):
            if instruction.name in _MEMO_PUT_OPCODES and number is not None and number > file.tell():
                raise ValueError(f"it uses memo number {number} within {file.tell()} bytes")
    except ValueError as error:
        raise pickle.UnpicklingError(f"not a valid pickle: {error}") from error
    file.seek(start)
