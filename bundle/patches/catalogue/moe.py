"""Mixture of experts on a machine without an accelerator."""

import ast
from typing import TYPE_CHECKING

from bundle.patches.entry import NOTHING, Patch, Presence, Replacement

if TYPE_CHECKING:
    from bundle.patches.definitions import Evidence

_MODULE = "megatron.core.transformer.moe.moe_utils"
_MOVE = f"{_MODULE}:maybe_move_tensor_to_cpu"
_GEMM = f"{_MODULE}:te_general_gemm"
_GATING = f"{_MODULE}:RouterGatingLinearFunction.forward"


def _numpy_from_cuda_only(source: "Evidence") -> Presence:
    move = source[_MOVE]
    if move is None or not move.calls("numpy"):
        return Presence.UNKNOWN
    return Presence.PRESENT if move.has("torch.is_tensor(tensor) and tensor.is_cuda") else Presence.UNKNOWN


def _unbound_without_te(source: "Evidence") -> Presence:
    """Whether the router reads a name that only a successful import of Transformer Engine binds."""
    gating, bound = source[_GATING], source.bindings(_GEMM)
    reads = gating is not None and "te_general_gemm" in gating.names
    if not bound:
        return Presence.ABSENT if source.has_module(_GEMM) and not reads else Presence.UNKNOWN
    imports = [node for node in bound if isinstance(node, ast.ImportFrom)]
    if any(not (node.module or "").endswith("extensions.transformer_engine") for node in imports):
        return Presence.UNKNOWN
    others = [node.value for node in bound if isinstance(node, ast.Assign)]
    if len(imports) + len(others) < len(bound) or not all(map(_may_be_none, others)):
        return Presence.UNKNOWN
    if others:
        return Presence.ABSENT
    return Presence.PRESENT if reads else Presence.UNKNOWN


def _may_be_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


PATCHES = (
    Patch(
        id="cpu-moe-splits-on-host",
        replacements=(Replacement(_MOVE, "bundle.wrappers.moe:splits_on_host", by_signature=True),),
        why="The sizes of the all-to-all become numbers only if they were on a GPU: TypeError with EP > 1.",
        silent=False,
        upstream="not reported; met on gloo in every release",
        range="",
        backends=("cpu",),
        when=frozenset({"moe"}),
        assumes=NOTHING,
        evidence=(_MOVE,),
        defect=_numpy_from_cuda_only,
    ),
    Patch(
        id="cpu-router-without-te-gemm",
        replacements=(
            Replacement(_GEMM, "bundle.wrappers.moe:without_te_gemm", exclusive=True, by_signature=True),
        ),
        why="NameError without Transformer Engine when the router computes in another type than the model.",
        silent=False,
        upstream="fixed upstream in 0.17",
        range=">=0.13,<0.17",
        fixed_in="0.17.0",
        backends=("cpu",),
        when=frozenset({"moe"}),
        assumes=NOTHING,
        evidence=(_GEMM, _GATING),
        defect=_unbound_without_te,
    ),
)
