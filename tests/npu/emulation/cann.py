"""Packages of CANN in Python that MindSpeed imports, and that nothing here computes with.

torchair, the graph compiler: MindSpeed registers its operators with it, and no graph is compiled. And where
$STAND_IN_TRITON says so, triton as triton-ascend brings it: kernels of MindSpeed's that no job of ours calls.
"""

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import MagicMock

from tests.npu.emulation.memory import NPU

COMPILER, TRITON = "torchair", "triton"


class Cann(MetaPathFinder, Loader):
    """Finds these packages, with whatever is imported from them."""

    def __init__(self, *packages: str) -> None:
        self.packages = packages

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        made = MagicMock(name=spec.name, __name__=spec.name, __path__=[], __spec__=spec)
        made.active_parameters.get_current_target.return_value.backend = NPU  # of triton.runtime.driver
        made.__version__ = "3.2.0"
        return made

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def install() -> None:
    """Puts the packages where imports find them."""
    packages = [COMPILER]
    if os.environ.get("STAND_IN_TRITON"):
        # torch asks for triton's version on its way, and takes what is here for one that compiles.
        from torch_npu.contrib import transfer_to_npu  # noqa: F401

        packages.append(TRITON)
        for name in [name for name in sys.modules if name.partition(".")[0] == TRITON]:
            del sys.modules[name]
    sys.meta_path.insert(0, Cann(*packages))
