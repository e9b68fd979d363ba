"""Makes a backend ready in this process, before megatron is imported."""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bundle.mcore.runtime import Runtime


@dataclass(frozen=True)
class Prepared:
    """The backend's runtime, and what all ranks must have in common: a name and a digest each."""

    runtime: "Runtime"
    identity: dict[str, str]


def prepare(backend: str) -> Prepared:
    """The runtime of `backend` (cpu, cuda, ascend)."""
    module = importlib.import_module(f"bundle.backends.{backend}.runtime")
    return Prepared(module.prepare(), {})
