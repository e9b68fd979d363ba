"""Which targets of ours MindSpeed replaces, by its commit: it calls every version of itself 0.12.1.

Read from the `register_patch` calls at the heads of its branches. Only what it replaces: what it wraps (its
own rule: a function whose name ends in wrapper or decorator) still calls upstream's code, and so can be
wrapped once more. Each replacement is behind a feature of MindSpeed's: these are targets it *may* own.
"""

BRANCHES = {
    "674226a15a8214cc0c78f986b0b89fbe6b879ba1": "2.3.0_core_r0.12.1",
    "3c44c134f396fc14a22a38934c7d5d8bedb37ff5": "26.0.0_core_r0.12.1",
    "57a33053c4eccd5b14aa58e3ca595ab414e65b94": "26.1.0_core_r0.12.1",
    "028de58ca629d035185b00ff7d1eb7eff4f7fd48": "master",
    "71b9e055b2183f5e0247c2e9d869f7c4890bdb45": "core_r0.14.0",
    "d0d5809d4323eb908f89e87958de254465eb57b4": "core_r0.15.3",
    "e4772499f7eb9fa9a68919dd1eaddef00e915b2d": "core_r0.16.0",
    "1f5feb86da9e6ccc6f8e981f5f0ac655a2d00ae5": "core_r0.17.0",
    "4213c91313fe4de6da12794109515f6275572750": "core_r0.18.0",
}
_ALL = frozenset(BRANCHES.values())
_MLA = "megatron.core.transformer.multi_latent_attention"
_MTP = "megatron.core.transformer.multi_token_prediction"

# target (or its class) -> the branches that replace it
REPLACED: dict[str, frozenset[str]] = {
    "megatron.core.distributed.finalize_model_grads:finalize_model_grads": _ALL,
    "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer.__init__": _ALL - {"core_r0.18.0"},
    "megatron.core.fp8_utils:quantize_param_shard": _ALL - {"core_r0.17.0", "core_r0.18.0"},
    "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:get_pos_emb_on_this_cp_rank": _ALL
    - {"core_r0.18.0"},
    "megatron.core.transformer.moe.router:TopKRouter.routing": _ALL,
    f"{_MLA}:MLASelfAttention": _ALL,
    f"{_MLA}:MultiLatentAttention.__init__": _ALL - {"core_r0.18.0"},
    f"{_MLA}:TELinear": frozenset({"core_r0.15.3", "core_r0.16.0"}),
    f"{_MLA}:apply_rotary_pos_emb": _ALL,
    f"{_MTP}:MultiTokenPredictionLayer._checkpointed_forward": frozenset({"core_r0.16.0"}),
    "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__": _ALL,
}

_UNSEEN = "and whether its own has the defect was not looked at"


def owned(target: str, commit: str | None) -> str | None:
    """Why the target may be MindSpeed's at this commit; None where it is not.

    A commit that was not read is taken for any of those that were.
    """
    branches = REPLACED.get(target) or REPLACED.get(target.rpartition(".")[0]) or frozenset()
    branch = BRANCHES.get(commit or "")
    if branch is None and branches:
        known = ", ".join(sorted(branches))
        which = (commit or "")[:12] or "of an unknown commit"
        return f"MindSpeed {which} was not read; {known} replace {target}, {_UNSEEN}"
    return f"MindSpeed {branch} replaces {target}, {_UNSEEN}" if branch in branches else None
