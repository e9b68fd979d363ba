"""Which parts of megatron-core a recipe uses, as names that patches and traps ask for."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bundle.recipe.recipe import Recipe


def features(recipe: "Recipe") -> frozenset[str]:
    """The names of everything the recipe uses that patches and traps distinguish.

    `attention-auto` stays as it is: what auto means is the backend's to say. `dp` is there when the recipe's
    own device counts, or else the layout's smallest world, have more than one replica.
    """
    architecture, model, parallel = recipe.architecture, recipe.model, recipe.parallel
    moe, mtp = architecture.moe is not None, architecture.mtp_layers > 0
    head_dims = architecture.head_dims
    world = recipe.devices.nodes * (recipe.devices.per_node or 0) or parallel.minimal_world
    granularity = model.recompute.granularity if model.recompute else None
    used = {
        "pretrain": recipe.task == "pretrain",
        "sft": recipe.task == "sft",
        "mla": architecture.mla is not None,
        "gqa": architecture.num_query_groups < architecture.num_attention_heads,
        "unequal-head-dims": head_dims[0] != head_dims[1],
        "tied-embeddings": architecture.tied_embeddings,
        "moe": moe,
        "router-replay": moe and model.router_replay,
        "expert-bias": architecture.moe is not None and architecture.moe.expert_bias,
        "mtp": mtp,
        "mtp-detached": mtp and model.mtp.detached,
        "packed": recipe.data.packed,
        "tp": parallel.tp > 1,
        "sp": parallel.sequence_parallel,
        "pp": parallel.pp > 1,
        "vpp": parallel.vpp is not None,
        "cp": parallel.cp > 1,
        "ep": parallel.ep > 1,
        "etp": moe and parallel.etp > 1,
        "dp": parallel.dp(world) > 1,
        "bf16": model.dtype == "bf16",
        "fp8": model.fp8 is not None,
        f"attention-{model.attention}": True,
        f"recompute-{granularity}": granularity is not None,
        "overlap-grad-reduce": recipe.distributed.overlap_grad_reduce,
        "overlap-param-gather": recipe.distributed.overlap_param_gather,
        "distributed-checkpoint": True,
        "async-checkpoint": recipe.checkpoint.async_,
    }
    return frozenset(name for name, is_used in used.items() if is_used)
