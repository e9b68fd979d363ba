"""The choice of experts and the way of tokens to them: replay of routes, sorting, corrections for a cpu."""

import ast

from bundle.patches.definitions import Definition, EvidenceDefinitions
from bundle.patches.entry import (
    LOCAL_LAYER_BACKENDS,
    NO_CALLER_ASSUMPTION,
    DefectKind,
    Patch,
    Presence,
    Replacement,
    build_signature_replacement,
    detect_in_definitions,
    detect_in_source,
)

_TOPK_ROUTER_CLASS = "megatron.core.transformer.moe.router:TopKRouter"
_ROUTING, _INIT = f"{_TOPK_ROUTER_CLASS}.routing", f"{_TOPK_ROUTER_CLASS}.__init__"
_ROUTER_REPLAY = "megatron.core.transformer.moe.router_replay:RouterReplay"
_REPLAY_TOPK_TARGET = f"{_ROUTER_REPLAY}.get_replay_topk"
_MOE_UTILS_MODULE = "megatron.core.transformer.moe.moe_utils"
_MOVE_TENSOR_TO_CPU_TARGET = f"{_MOE_UTILS_MODULE}:maybe_move_tensor_to_cpu"
_MOE_UTILS_TE_GEMM_TARGET = f"{_MOE_UTILS_MODULE}:te_general_gemm"
_GATING_LINEAR_FORWARD = f"{_MOE_UTILS_MODULE}:RouterGatingLinearFunction.forward"
ALLTOALL_DISPATCHER_CLASS = "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"
_SORTING_STEPS = (
    f"{ALLTOALL_DISPATCHER_CLASS}.dispatch_postprocess",
    f"{ALLTOALL_DISPATCHER_CLASS}.combine_preprocess",
)


@detect_in_definitions(_ROUTING, _INIT, optional=(_ROUTER_REPLAY,))
def _lacks_replay(routing: Definition, built: Definition, native: Definition | None) -> Presence:
    """Return whether neither a router nor its module has a replay. A fork may have one of its own."""
    known = "router_replay" in routing.identifiers
    foreign = not known and any("replay" in name for name in built.identifiers)
    return (
        Presence.from_bool(not known) if known == (native is not None) and not foreign else Presence.UNKNOWN
    )


@detect_in_source(_REPLAY_TOPK_TARGET, _ROUTER_REPLAY, _ROUTING)
def _replays_every_token(source: EvidenceDefinitions) -> Presence:
    """Return whether the replay exists and cannot leave a token to its router."""
    replay = source[_REPLAY_TOPK_TARGET]
    if replay is None:
        return _classify_code_without_replay(source)
    return Presence.from_matches("gather" in replay.identifiers and "where" not in replay.identifiers)


@detect_in_source(_REPLAY_TOPK_TARGET, _ROUTER_REPLAY, _ROUTING)
def _replays_latest_routes(source: EvidenceDefinitions) -> Presence:
    """Return whether only the action that the user set decides which micro-batch's routes are taken."""
    replay = source[_REPLAY_TOPK_TARGET]
    if replay is None:
        return _classify_code_without_replay(source)
    recompute_flags = {"_current_graph_task_id", "is_checkpointing", "is_grad_enabled"} & replay.identifiers
    return Presence.from_matches(
        {"target_topk_idx", "replay_backward_list"} <= replay.identifiers and not recompute_flags
    )


def _classify_code_without_replay(source: EvidenceDefinitions) -> Presence:
    return Presence.from_matches(absent=source[_ROUTING] and not source[_ROUTER_REPLAY])


@detect_in_definitions(_MOVE_TENSOR_TO_CPU_TARGET)
def _detect_gpu_only_split_conversion(move: Definition) -> Presence:
    """Return whether only tensors on a GPU are converted to numbers."""
    return Presence.from_matches(
        move.find_calls("numpy") and move.has_pattern("torch.is_tensor(tensor) and tensor.is_cuda")
    )


@detect_in_source(_MOE_UTILS_TE_GEMM_TARGET, _GATING_LINEAR_FORWARD)
def _needs_transformer_engine(source: EvidenceDefinitions) -> Presence:
    """Return whether the router reads a name that only an import of Transformer Engine binds."""
    gating, bound = source[_GATING_LINEAR_FORWARD], source.find_bindings(_MOE_UTILS_TE_GEMM_TARGET)
    read = gating is not None and "te_general_gemm" in gating.identifiers
    if not bound:
        return Presence.from_matches(absent=source.has_module(_MOE_UTILS_TE_GEMM_TARGET) and not read)
    imports = [node for node in bound if isinstance(node, ast.ImportFrom)]
    if any(not (node.module or "").endswith("extensions.transformer_engine") for node in imports):
        return Presence.UNKNOWN
    assignments = [node.value for node in bound if isinstance(node, ast.Assign)]
    if len(imports) + len(assignments) < len(bound) or not all(map(_is_none_literal, assignments)):
        return Presence.UNKNOWN
    return Presence.from_matches(read and not assignments, absent=assignments)


@detect_in_definitions(optional=(f"{ALLTOALL_DISPATCHER_CLASS}.token_permutation", *_SORTING_STEPS))
def _sorts_sorted_tokens(permutation: Definition | None, *steps: Definition | None) -> Presence:
    """Return whether the number of a rank's experts alone decides that a step sorts its tokens again.

    In 0.12 the sorts are no steps of their own.
    """
    if not any(steps):
        return Presence.from_matches(absent=permutation)
    return Presence.from_matches(
        all(
            step and step.find_calls("sort_chunks_by_idxs") and step.has_pattern("self.num_local_experts > 1")
            for step in steps
        )
    )


def _is_none_literal(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


PATCHES = (
    Patch(
        id="router-replay",
        replacements=(Replacement(_ROUTING, "moe:replay_recorded_routes"),),
        why="The router cannot use recorded experts.",
        kind=DefectKind.ERROR,
        upstream="NVIDIA/Megatron-LM#2101 adds one in 0.16",
        range="<0.16",
        when=frozenset({"moe", "router-replay"}),
        assumes=(
            "routes are given in bundle.mcore.context.router_choices around each forward pass; without them "
            "nothing changes"
        ),
        defect=_lacks_replay,
    ),
    Patch(
        id="router-replay-by-layer",
        replacements=(Replacement(_REPLAY_TOPK_TARGET, "moe:override_native_replay"),),
        why=(
            "Megatron's replay of routes cannot leave the choice for one token to the router, as the last "
            "token of a rollout needs. It also numbers routers in the order of construction, which "
            "includes routers of MTP and of other models."
        ),
        kind=DefectKind.ERROR,
        upstream="not reported; read in NVIDIA/Megatron-LM#2101",
        range=">=0.16",
        when=frozenset({"moe", "router-replay"}),
        assumes=(
            "routes are given in bundle.mcore.context.router_choices around each forward pass; without them "
            "nothing changes"
        ),
        defect=_replays_every_token,
    ),
    Patch(
        id="native-replay-recompute",
        replacements=(Replacement(_REPLAY_TOPK_TARGET, "moe:keep_routes_on_recompute"),),
        why=(
            "A recomputation uses the routes of the latest micro-batch instead of its own. With two micro- "
            "batches in flight the gradients are wrong, and no error is raised."
        ),
        kind=DefectKind.SILENT,
        upstream="not reported; found by comparing replay with and without recomputation in PP2",
        range=">=0.16",
        when=frozenset({"moe", "router-replay"}),
        assumes=(
            "routes are set before the forward pass of every micro-batch, which are recomputed in that order"
        ),
        defect=_replays_latest_routes,
    ),
    Patch(
        id="sort-of-sorted-tokens",
        replacements=tuple(Replacement(step, "moe:skip_sort_of_sorted_tokens") for step in _SORTING_STEPS),
        why=(
            "If every rank has all experts, each MoE layer copies its tokens four times in vain: it sorts"
            " them by expert although they are in that order."
        ),
        kind=DefectKind.SLOW,
        upstream="not reported; seen in a profile of one H100 (28 ms in a step of 670 ms)",
        range=">=0.13",
        when=frozenset({"moe", "all-experts-on-each-rank"}),
        assumes=NO_CALLER_ASSUMPTION,
        defect=_sorts_sorted_tokens,
    ),
    Patch(
        id="cpu-moe-splits-on-host",
        replacements=(
            build_signature_replacement(_MOVE_TENSOR_TO_CPU_TARGET, "moe:convert_cpu_splits_to_numpy"),
        ),
        why="TypeError with EP > 1: the sizes of the all-to-all become numbers only if they were on a GPU.",
        kind=DefectKind.ERROR,
        upstream="not reported; met on gloo in every release",
        range="",
        backends=("cpu",),
        when=frozenset({"moe"}),
        assumes=NO_CALLER_ASSUMPTION,
        defect=_detect_gpu_only_split_conversion,
    ),
    Patch(
        id="router-without-te-gemm",
        replacements=(
            build_signature_replacement(
                _MOE_UTILS_TE_GEMM_TARGET, "moe:disable_te_router_gemm", exclusive=True
            ),
        ),
        why="NameError without Transformer Engine if the router computes in another type than the model.",
        kind=DefectKind.ERROR,
        upstream="fixed upstream in 0.17",
        range=">=0.13,<0.17",
        backends=LOCAL_LAYER_BACKENDS,
        when=frozenset({"moe"}),
        assumes=NO_CALLER_ASSUMPTION,
        defect=_needs_transformer_engine,
    ),
)
