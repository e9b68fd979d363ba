"""A program that imports modules of a framework, in which the patches are enabled; prints where each stops.

What is compiled for CUDA and is imported by name has a stand-in, whose every attribute is an empty class, so
that the imports go on. Fails where a patch is not on what was imported, or the framework holds what a patch
replaces.
"""

import importlib
import importlib.metadata
import sys
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from bundle.patches import patcher

# Those of the image cuda-mcore0.16; apex says none.
VERSIONS = {"transformer_engine": "2.11.0", "flash_attn": "2.8.3", "apex": ""}


class Empty(type):
    """A class of which everything may be asked that a module asks while it is imported."""

    def __getattr__(cls, name: str) -> "Empty":
        return empty(name, cls.__module__)

    def __or__(cls, other: object) -> Any:
        return object


def empty(name: str, module: str) -> Empty:
    """A class of that name."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Empty(name, (), {"__module__": module})


class StandIn(ModuleType):
    """A module, and all modules below it, of what is compiled for CUDA."""

    def __init__(self, name: str, version: str) -> None:
        super().__init__(name)
        self.__version__ = version

    def __getattr__(self, name: str) -> Empty:
        setattr(self, name, empty(name, self.__name__))
        return self.__dict__[name]  # type: ignore[no-any-return]


class StandIns(MetaPathFinder, Loader):
    """Finds them where nothing else does."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in VERSIONS else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name, VERSIONS[spec.name.partition(".")[0]])

    def exec_module(self, module: ModuleType) -> None:
        pass


def within(function: Any) -> Iterator[Any]:
    """A function and those that it keeps, as one that is put around another does."""
    yield function
    for cell in getattr(function, "__closure__", None) or ():
        if hasattr(cell.cell_contents, "__code__"):
            yield from within(cell.cell_contents)


def is_known(function: Any) -> bool:
    """Whether it is ours or megatron's: a wrapper may leave what it is given, and a value has no code."""
    code = getattr(function, "__code__", None)
    return code is None or any(folder in code.co_filename for folder in ("/bundle/", "/megatron/core/"))


installed = importlib.metadata.version
importlib.metadata.version = lambda distribution_name: (
    VERSIONS.get(distribution_name.replace("-", "_")) or installed(distribution_name)
)
sys.meta_path.append(StandIns())
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        print("imported", name)
    except Exception as error:  # noqa: BLE001 - some refuse in words of their own what they were not built for
        print("stopped", getattr(error, "name", None) or repr(error), "in", name)
plan = patcher.get_active_plan()
assert plan is not None
planned = [step for step in plan.steps if step.target.partition(":")[0] in sys.modules]
assert sorted(patcher.list_applied_targets()) == sorted(step.target for step in planned), (
    patcher.list_applied_targets()
)
frameworks = {name.partition(".")[0] for name in sys.argv[1:]}
theirs = [module for name, module in sys.modules.items() if name.partition(".")[0] in frameworks]
for step in planned:
    module, _, path = step.target.partition(":")
    now: Any = sys.modules[module]
    for part in path.split("."):
        now = getattr(now, part)
    ours = [function for function in within(now) if is_known(function)]
    assert ours, f"{step.target} is another's: {now}"
    before = getattr(ours[0], "__wrapped__", None)
    held = [
        m.__name__ for m in theirs for value in vars(m).values() if before is not None and value is before
    ]
    assert not held or step.file != step.code_file, f"{held} hold {step.target} as it was"
    print("patched", step.patch, step.target)
    for holder in held:  # have it from its home, as that is replaced in one module of megatron's only
        print("elsewhere", step.patch, holder)
