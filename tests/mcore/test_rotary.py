"""The frequencies of stretched rotary positions are those of transformers, to the last bits."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bundle.architectures import from_config
from tests.architectures.test_architectures import DENSE

FACTOR = st.floats(1.0, 100.0)
LENGTH = st.integers(4, 100_000)
YARN = st.fixed_dictionaries(
    {"rope_type": st.just("yarn"), "factor": FACTOR, "original_max_position_embeddings": LENGTH},
    optional={
        "beta_fast": st.floats(1.0, 64.0),
        "beta_slow": st.floats(0.1, 64.0),
        "truncate": st.booleans(),
        "attention_factor": st.floats(0.1, 3.0),
        "mscale": st.floats(0.0, 2.0),
        "mscale_all_dim": st.floats(0.0, 2.0),
    },
)
LLAMA3 = st.fixed_dictionaries(
    {
        "rope_type": st.just("llama3"),
        "factor": FACTOR,
        "original_max_position_embeddings": LENGTH,
        "low_freq_factor": st.floats(0.1, 2.0),
        "high_freq_factor": st.floats(2.1, 16.0),
    }
)
LINEAR = st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": FACTOR})


@given(
    parameters=YARN | LLAMA3 | LINEAR,
    theta=st.floats(2.0, 1e7),
    width=st.integers(1, 64).map(lambda pairs: 2 * pairs),
)
def test_frequencies_and_concentration(parameters, theta, width):
    wanted = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    rotary = pytest.importorskip("bundle.mcore.rotary")
    read = from_config(
        DENSE
        | {"model_type": "llama", "head_dim": width}
        | {"rope_parameters": {"rope_theta": theta, **parameters}}
    )
    assert read.rope_scaling is not None
    theirs = SimpleNamespace(
        rope_parameters={"rope_theta": theta, **parameters},
        head_dim=width,
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=128,
        standardize_rope_params=lambda: None,
    )
    table, factor = wanted[parameters["rope_type"]](theirs)
    torch.testing.assert_close(
        rotary.compute_frequencies(theta, width, read.rope_scaling), table, rtol=3e-7, atol=0
    )
    assert read.rope_scaling.concentration == pytest.approx(factor, rel=1e-12)


def test_the_embedding_of_the_fused_kernel_takes_the_same_frequencies(megatron):
    """Also where it has computed from its own before: it keeps sines and cosines."""
    from megatron.core.models.common.embeddings import rotary_pos_embedding, yarn_rotary_pos_embedding

    from bundle.mcore import rotary

    plain = rotary_pos_embedding.RotaryEmbedding(16, 1.0)
    fused = yarn_rotary_pos_embedding.YarnRotaryEmbedding(
        16, scaling_factor=4.0, original_max_position_embeddings=32, mscale=0.5, mscale_all_dim=0.5
    )
    table = torch.rand(8)
    for embedding in (plain, fused):
        embedding(24)
        rotary._set_frequencies(embedding, table)
    angles, factor = fused(24)
    assert factor == 1.0
    torch.testing.assert_close(angles, plain(24))
    torch.testing.assert_close(angles[:, 0, 0, :8], torch.arange(24.0)[:, None] * table)
    cosines, sines = fused.get_cached_cos_sin(24, dtype=torch.float32)
    torch.testing.assert_close((cosines, sines), (angles.cos(), angles.sin()))
