"""Every family trains as plain PyTorch does that reads the same config, on any ranks, packed or not."""

import pytest

from bundle.environment import packages
from tests.engine.cells import AGREES_WITH_DOUBLES
from tests.engine.test_layouts import seen_by, wrong
from tests.reference.configs import CONFIGS

# Between them: grouped and latent attention, partly turned heads, experts, prediction, a tied head, sinks.
REPRESENTATIVES = ("glm4_moe", "deepseek_v3", "qwen3_moe", "llama3", "mimo", "gpt_oss")


@pytest.mark.world
def test_every_family_trains_as_plain_pytorch_does(core):
    # Over two ranks first: those of one rank are shared out, and one process may be ahead of the other.
    sinks = not packages.is_base_version_within(core.version, "<0.15")
    there = [name for name in CONFIGS if sinks or not name.startswith("gpt_oss")]
    pairs = [(name, 2) for name in (there if core.tree else REPRESENTATIVES)]
    sizes = {f"tests.engine.oracle:{name} on {n}": n for name, n in (*pairs, *((c, 1) for c in there))}
    assert not wrong(seen_by(core, sizes), AGREES_WITH_DOUBLES)
