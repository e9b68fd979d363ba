"""A stand-in for Transformer Engine, a contract: its layers mark weights as the real ones do, and do no more.

Read in Transformer Engine 2.14.1: `Linear.reset_parameters` marks every weight as split over tensor-parallel
ranks, whatever `parallel_mode` is; `GroupedLinear.reset_parameters` marks none.
"""

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

VERSION = "2.14.1"


class Linear(torch.nn.Module):
    def __init__(self, in_features: int, out_features: int, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features))
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]


class GroupedLinear(torch.nn.Module):
    def __init__(self, num_gemms: int, in_features: int, out_features: int, **_: Any) -> None:
        super().__init__()
        for i in range(num_gemms):
            setattr(self, f"weight{i}", torch.nn.Parameter(torch.empty(out_features, in_features)))


class _Anything(ModuleType):
    """A module that has every name: the layers above, empty classes, and modules like itself."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].islower():
            return importlib.import_module(f"{self.__name__}.{name}")
        found = {"Linear": Linear, "GroupedLinear": GroupedLinear}.get(name) or type(
            name, (), {"apply": None}
        )
        setattr(self, name, found)
        return found


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        ours = name.partition(".")[0] == "transformer_engine"
        return ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__version__"] = VERSION


def install() -> None:
    """Puts the stand-in in the place of the package."""
    sys.meta_path.insert(0, _Finder())
