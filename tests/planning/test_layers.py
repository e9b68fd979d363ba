"""What a layer leaves behind, counted by hand where the parts of a tensor lie on several ranks."""

from packaging.version import Version

from bundle.capabilities.cpu import LOCAL_LAYER_TRAITS
from bundle.environment.packages import MegatronCode
from bundle.planning.activations import LayerByteCounter
from tests.planning.jobs import DEEPSEEK, QWEN3, job

TOKENS, HIDDEN, BF16, FP32 = 64, 64, 2, 4


def counted(config, *, experts=False, **parallel):
    return LayerByteCounter(
        job(config, parallel=parallel), LOCAL_LAYER_TRAITS, MegatronCode(Version("0.16.1"))
    ).count_layer_bytes(experts)


def test_sequence_parallelism_cuts_the_residual_stream_and_nothing_else():
    """Two norms of a layer keep it twice in fp32, with a factor for each token, and what they give away."""
    norm = 2 * HIDDEN * FP32 + FP32 + HIDDEN * BF16
    whole = counted(QWEN3, tp=2, sequence_parallel=False)
    assert whole - counted(QWEN3, tp=2, sequence_parallel=True) == TOKENS // 2 * 2 * norm


def test_adapters_keep_their_narrow_products_and_copies_of_their_matrices():
    def count_with_rank(rank, experts=False, **lora):
        config = DEEPSEEK if experts else QWEN3
        model = {"config": config, "lora": {"rank": rank, "alpha": 8} | lora}
        recipe, code = job(config, model=model), MegatronCode(Version("0.16.1"))
        return LayerByteCounter(recipe, LOCAL_LAYER_TRAITS, code).count_layer_bytes(experts)

    joined = (4 + 2 + 2) * 16  # queries, keys and values
    difference = count_with_rank(7, targets=["q_proj"]) - count_with_rank(3, targets=["q_proj"])
    assert difference == 4 * BF16 * (TOKENS + HIDDEN + joined)
    difference = count_with_rank(7, experts=True, targets=["down_proj"]) - count_with_rank(
        3, experts=True, targets=["down_proj"]
    )
    shared = TOKENS + 40 + HIDDEN
    assert difference == 4 * BF16 * (TOKENS * 2 + 8 * (40 + HIDDEN) + shared)


def test_ranks_that_share_an_expert_have_the_tokens_of_all_of_them():
    """Twice the copies, each through half of an expert: what lies between the two products stays the same.

    The input of an expert, and of the product by the router's weight, is not cut.
    """
    one, both = (counted(DEEPSEEK, experts=True, tp=2, ep=1, etp=etp) for etp in (1, 2))
    copies = TOKENS // 2 * 2  # two experts a token
    assert both - one == copies * HIDDEN * BF16
