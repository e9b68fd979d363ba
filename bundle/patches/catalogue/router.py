"""Choice of experts: replay of recorded routes."""

from typing import TYPE_CHECKING

from bundle.patches.entry import Patch, Presence, Replacement

if TYPE_CHECKING:
    from bundle.patches.definitions import Evidence

_ROUTING = "megatron.core.transformer.moe.router:TopKRouter.routing"
_NATIVE = "megatron.core.transformer.moe.router_replay:RouterReplay"
_REPLAY = f"{_NATIVE}.get_replay_topk"


def _no_replay(source: "Evidence") -> Presence:
    routing = source[_ROUTING]
    if routing is None:
        return Presence.UNKNOWN
    asks = "router_replay" in routing.names
    if asks != (source[_NATIVE] is not None):
        return Presence.UNKNOWN
    return Presence.of(not asks)


def _all_or_nothing(source: "Evidence") -> Presence:
    """Whether there is a replay that cannot leave a token to its router."""
    replay = source[_REPLAY]
    if replay is None:
        return Presence.of(False) if source[_ROUTING] and not source[_NATIVE] else Presence.UNKNOWN
    if "gather" not in replay.names:
        return Presence.UNKNOWN
    return Presence.UNKNOWN if "where" in replay.names else Presence.PRESENT


def _latest_routes(source: "Evidence") -> Presence:
    """Whether only the action that the user set decides which micro-batch's routes are taken."""
    replay = source[_REPLAY]
    if replay is None:
        return Presence.of(False) if source[_ROUTING] and not source[_NATIVE] else Presence.UNKNOWN
    if not {"target_topk_idx", "replay_backward_list"} <= replay.names:
        return Presence.UNKNOWN
    tells = {"_current_graph_task_id", "is_checkpointing", "is_grad_enabled"} & replay.names
    return Presence.UNKNOWN if tells else Presence.PRESENT


PATCHES = (
    Patch(
        id="router-replay",
        replacements=(Replacement(_ROUTING, "bundle.wrappers.router:choice"),),
        why="There is no way to make the router take recorded experts.",
        silent=False,
        upstream="NVIDIA/Megatron-LM#2101 adds one in 0.16",
        range="<0.16",
        fixed_in="0.16.0",
        when=frozenset({"moe", "router-replay"}),
        assumes=(
            "routes are given in bundle.mcore.context.choices around each forward pass; without them "
            "nothing changes"
        ),
        evidence=(_ROUTING, _NATIVE),
        defect=_no_replay,
    ),
    Patch(
        id="router-replay-by-layer",
        replacements=(Replacement(_REPLAY, "bundle.wrappers.router:choice_in_replay"),),
        why=(
            "Megatron's replay cannot leave a token to its router, as a rollout's last one must be, and knows"
            " routers by order of construction: chunk by chunk, those of MTP and of other models too."
        ),
        silent=False,
        upstream="not reported; read in NVIDIA/Megatron-LM#2101",
        range=">=0.16",
        when=frozenset({"moe", "router-replay"}),
        assumes=(
            "routes are given in bundle.mcore.context.choices around each forward pass; without them "
            "nothing changes"
        ),
        evidence=(_REPLAY, _NATIVE, _ROUTING),
        defect=_all_or_nothing,
    ),
    Patch(
        id="native-replay-recompute",
        replacements=(Replacement(_REPLAY, "bundle.wrappers.router:own_routes_on_recompute"),),
        why=(
            "A recomputation takes the routes of the latest micro-batch instead of its own: wrong gradients, "
            "silently, as soon as two micro-batches are in flight."
        ),
        silent=True,
        upstream="not reported; found by comparing replay with and without recomputation in PP2",
        range=">=0.16",
        when=frozenset({"moe", "router-replay"}),
        assumes=(
            "routes are set before the forward pass of every micro-batch, which are recomputed in that order"
        ),
        evidence=(_REPLAY, _NATIVE, _ROUTING),
        defect=_latest_routes,
    ),
)
