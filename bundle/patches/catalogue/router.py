"""Choice of experts: replay of recorded routes, and what a cpu lacks for it."""

import ast

from bundle.patches.definitions import Definition, Evidence
from bundle.patches.entry import (
    LOCAL_LAYERS,
    NOTHING,
    DefectKind,
    Patch,
    Presence,
    Replacement,
    asks,
    called,
    reads,
)

_ROUTER = "megatron.core.transformer.moe.router:TopKRouter"
_ROUTING, _BUILT = f"{_ROUTER}.routing", f"{_ROUTER}.__init__"
_NATIVE = "megatron.core.transformer.moe.router_replay:RouterReplay"
_REPLAY = f"{_NATIVE}.get_replay_topk"
_UTILS = "megatron.core.transformer.moe.moe_utils"
_MOVE = f"{_UTILS}:maybe_move_tensor_to_cpu"
_GEMM = f"{_UTILS}:te_general_gemm"
_GATING = f"{_UTILS}:RouterGatingLinearFunction.forward"


@reads(_ROUTING, _BUILT, also=(_NATIVE,))
def _no_replay(routing: Definition, built: Definition, native: Definition | None) -> Presence:
    """Whether neither a router nor its module knows of a replay; a fork may have one of its own."""
    known = "router_replay" in routing.names
    foreign = not known and any("replay" in name for name in built.names)
    return Presence.of(not known) if known == (native is not None) and not foreign else Presence.UNKNOWN


@asks(_REPLAY, _NATIVE, _ROUTING)
def _all_or_nothing(source: Evidence) -> Presence:
    """Whether there is a replay that cannot leave a token to its router."""
    replay = source[_REPLAY]
    if replay is None:
        return _without_replay(source)
    return Presence.told("gather" in replay.names and "where" not in replay.names)


@asks(_REPLAY, _NATIVE, _ROUTING)
def _latest_routes(source: Evidence) -> Presence:
    """Whether only the action that the user set decides which micro-batch's routes are taken."""
    replay = source[_REPLAY]
    if replay is None:
        return _without_replay(source)
    tells = {"_current_graph_task_id", "is_checkpointing", "is_grad_enabled"} & replay.names
    return Presence.told({"target_topk_idx", "replay_backward_list"} <= replay.names and not tells)


def _without_replay(source: Evidence) -> Presence:
    return Presence.told(absent=source[_ROUTING] and not source[_NATIVE])


@reads(_MOVE)
def _numpy_from_cuda_only(move: Definition) -> Presence:
    """Whether only what was on a GPU becomes numbers."""
    return Presence.told(move.calls("numpy") and move.has("torch.is_tensor(tensor) and tensor.is_cuda"))


@asks(_GEMM, _GATING)
def _unbound_without_te(source: Evidence) -> Presence:
    """Whether the router reads a name that only a successful import of Transformer Engine binds."""
    gating, bound = source[_GATING], source.bindings(_GEMM)
    read = gating is not None and "te_general_gemm" in gating.names
    if not bound:
        return Presence.told(absent=source.has_module(_GEMM) and not read)
    imports = [node for node in bound if isinstance(node, ast.ImportFrom)]
    if any(not (node.module or "").endswith("extensions.transformer_engine") for node in imports):
        return Presence.UNKNOWN
    others = [node.value for node in bound if isinstance(node, ast.Assign)]
    if len(imports) + len(others) < len(bound) or not all(map(_may_be_none, others)):
        return Presence.UNKNOWN
    return Presence.told(read and not others, absent=others)


def _may_be_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


PATCHES = (
    Patch(
        id="router-replay",
        replacements=(Replacement(_ROUTING, "moe:choice"),),
        why="There is no way to make the router take recorded experts.",
        kind=DefectKind.ERROR,
        upstream="NVIDIA/Megatron-LM#2101 adds one in 0.16",
        range="<0.16",
        when=frozenset({"moe", "router-replay"}),
        assumes=(
            "routes are given in bundle.mcore.context.choices around each forward pass; without them "
            "nothing changes"
        ),
        defect=_no_replay,
    ),
    Patch(
        id="router-replay-by-layer",
        replacements=(Replacement(_REPLAY, "moe:choice_in_replay"),),
        why=(
            "Megatron's replay cannot leave a token to its router, as a rollout's last one must be, and knows"
            " routers by order of construction: chunk by chunk, those of MTP and of other models too."
        ),
        kind=DefectKind.ERROR,
        upstream="not reported; read in NVIDIA/Megatron-LM#2101",
        range=">=0.16",
        when=frozenset({"moe", "router-replay"}),
        assumes=(
            "routes are given in bundle.mcore.context.choices around each forward pass; without them "
            "nothing changes"
        ),
        defect=_all_or_nothing,
    ),
    Patch(
        id="native-replay-recompute",
        replacements=(Replacement(_REPLAY, "moe:own_routes_on_recompute"),),
        why=(
            "A recomputation takes the routes of the latest micro-batch instead of its own: wrong gradients, "
            "silently, as soon as two micro-batches are in flight."
        ),
        kind=DefectKind.SILENT,
        upstream="not reported; found by comparing replay with and without recomputation in PP2",
        range=">=0.16",
        when=frozenset({"moe", "router-replay"}),
        assumes=(
            "routes are set before the forward pass of every micro-batch, which are recomputed in that order"
        ),
        defect=_latest_routes,
    ),
    Patch(
        id="cpu-moe-splits-on-host",
        replacements=(called(_MOVE, "moe:splits_on_host"),),
        why="The sizes of the all-to-all become numbers only if they were on a GPU: TypeError with EP > 1.",
        kind=DefectKind.ERROR,
        upstream="not reported; met on gloo in every release",
        range="",
        backends=("cpu",),
        when=frozenset({"moe"}),
        assumes=NOTHING,
        defect=_numpy_from_cuda_only,
    ),
    Patch(
        id="router-without-te-gemm",
        replacements=(called(_GEMM, "moe:without_te_gemm", exclusive=True),),
        why="NameError without Transformer Engine when the router computes in another type than the model.",
        kind=DefectKind.ERROR,
        upstream="fixed upstream in 0.17",
        range=">=0.13,<0.17",
        backends=LOCAL_LAYERS,
        when=frozenset({"moe"}),
        assumes=NOTHING,
        defect=_unbound_without_te,
    ),
)
