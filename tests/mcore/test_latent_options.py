"""What megatron is asked for where a kernel computes the rotary positions of latent attention."""

import pytest

pytest.importorskip("megatron.core")
from bundle.mcore import gpt
from tests.planning.jobs import DEEPSEEK, job

NAMES = ("rope_type", "rotary_scaling_factor", "mscale", "mscale_all_dim", "rotary_base")
YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 32,
    "mscale": 0.5,
    "mscale_all_dim": 0.25,
}


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize(
    ("scaling", "factor", "mscale"), [(None, 1.0, 0.0), (YARN, 40.0, 0.25)], ids=["plain", "yarn"]
)
def test_only_scaled_positions_scale_the_softmax(is_fused, scaling, factor, mscale):
    config = DEEPSEEK | {"rope_theta": 12345.0, "rope_scaling": scaling}
    architecture = job(config, model={"config": config}).architecture
    assert architecture.mla is not None
    options = gpt._build_mla_options(architecture, architecture.mla, is_fused=is_fused)
    expected = ("yarn" if is_fused else "rope", factor, mscale, mscale, 12345.0)
    assert tuple(options[name] for name in NAMES) == expected
