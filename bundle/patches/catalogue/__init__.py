"""The patches, the traps and the seams: a module for each area of megatron-core, with PATCHES and TRAPS.

Seams are the private names of megatron-core that the bundle relies on without replacing them.
"""

from bundle.patches.catalogue import (
    attention,
    balancing,
    checkpoints,
    gradients,
    mla,
    mtp,
    recompute,
    router,
)
from bundle.patches.entry import Patch, Seam, Trap

# In this order wrappers are put on a target that several patches share: the first is the innermost.
_MODULES_IN_WRAP_ORDER = (mla, mtp, recompute, router, balancing, gradients, checkpoints, attention)
PATCHES: tuple[Patch, ...] = tuple(patch for area in _MODULES_IN_WRAP_ORDER for patch in area.PATCHES)
# Known traps: defects with no narrow fix, whose recipes are refused.
TRAPS: tuple[Trap, ...] = tuple(
    trap for area in _MODULES_IN_WRAP_ORDER for trap in getattr(area, "TRAPS", ())
)

_GPT_MODEL_CLASS_PATH = "megatron.core.models.gpt.gpt_model:GPTModel"
_MTP_MODULE_PATH = "megatron.core.transformer.multi_token_prediction"
_ROUTER_CLASS_PATH = "megatron.core.transformer.moe.router:TopKRouter"
_ROPE_UTILS_MODULE_PATH = "megatron.core.models.common.embeddings.rope_utils"
_MTP_LOSS_TRACKER_PATH = f"{_MTP_MODULE_PATH}:MTPLossLoggingHelper"

SEAMS = (
    Seam(
        id="main-loss",
        targets=(
            "megatron.core.models.common.language_module.language_module"
            ":LanguageModule.compute_language_model_loss",
        ),
        use="intercepted on the model by the engine",
        why="The main loss and that of every MTP depth pass through it; the labels' identity tells them"
        " apart.",
        by_signature=True,
    ),
    Seam(
        id="forward-labels",
        targets=(f"{_GPT_MODEL_CLASS_PATH}.forward",),
        use="hooked by the engine, which reads the labels",
        why="The labels here are the same object that reaches the main loss.",
        by_signature=True,
    ),
    Seam(
        id="mtp-block",
        targets=(f"{_MTP_MODULE_PATH}:MultiTokenPredictionBlock.forward",),
        use="wrapped on the model by mcore if MTP is detached from the rest",
        why="In every release it has keyword arguments for hidden states and an embedding.",
        by_signature=True,
        when=frozenset({"mtp", "mtp-detached"}),
    ),
    Seam(
        id="mtp-head",
        targets=("megatron.core.tensor_parallel.layers:ColumnParallelLinear.forward",),
        use="hooked on the model's output layer by mcore if MTP is detached from the embeddings",
        why="It has a keyword argument for a weight, even if it has its own weight.",
        by_signature=True,
        when=frozenset({"mtp", "mtp-detached"}),
    ),
    Seam(
        id="rotary-rows",
        targets=(
            f"{_ROPE_UTILS_MODULE_PATH}:_apply_rotary_pos_emb_bshd",
            f"{_ROPE_UTILS_MODULE_PATH}:_get_thd_freqs_on_this_cp_rank",
        ),
        use="called by the patch packed-rotary-host-reads, which also reads its parameters",
        why="The first rotates each row by its angle; the second tells whether a table may be a pack's.",
        when=frozenset({"packed"}),
        by_signature=True,
    ),
    Seam(
        id="mtp-switch",
        targets=(f"{_GPT_MODEL_CLASS_PATH}.__init__",),
        use="its attribute mtp_process is set by mcore for a forward pass without MTP",
        why="With config.mtp_num_layers it decides whether MTP layers run.",
        when=frozenset({"mtp"}),
    ),
    Seam(
        id="mtp-tracker",
        targets=(
            f"{_MTP_LOSS_TRACKER_PATH}.save_loss_to_tracker",
            f"{_MTP_LOSS_TRACKER_PATH}.reduce_loss_in_tracker",
            f"{_MTP_LOSS_TRACKER_PATH}.save_metrics_to_tracker",
            f"{_MTP_LOSS_TRACKER_PATH}.reduce_metrics_in_tracker",
        ),
        use="read by training",
        why="Megatron's own MTP loss. Every rank must enter its collective. Renamed in 0.19.",
        when=frozenset({"mtp"}),
    ),
    Seam(
        id="position-embedding-ranks",
        targets=("megatron.core.parallel_state:_POSITION_EMBEDDING_GLOBAL_RANKS",),
        use="reset by mcore when it forgets a layout",
        why="0.12 does not reset it, and a rank then looks for a group that the next layout does not have.",
    ),
    Seam(
        id="expert-balancing",
        targets=(f"{_ROUTER_CLASS_PATH}.routing", f"{_ROUTER_CLASS_PATH}.__init__"),
        use="wrapped on the routers by mcore, with their counts in local_tokens_per_expert",
        why="It receives all logits of a micro-batch and returns the experts that are counted for the bias.",
        when=frozenset({"moe"}),
    ),
    Seam(
        id="native-replay",
        targets=(
            "megatron.core.transformer.moe.router_replay:RouterReplay.set_target_indices",
            "megatron.core.transformer.moe.router_replay:RouterReplay.set_router_replay_action",
        ),
        use="called by verification, which shows their errors",
        why="Megatron's own router replay; the engine replays through the choice of experts below it.",
        by_signature=True,
        range=">=0.16",
        when=frozenset({"moe", "router-replay"}),
    ),
)
