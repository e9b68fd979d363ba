"""Every family trains as plain PyTorch does that reads the same config, on any ranks, packed or not."""

import pytest

from tests.engine.cells import AGREES_WITH_DOUBLES
from tests.engine.test_layouts import measured, wrong
from tests.matrix.test_layouts import newest_of_each_minor
from tests.reference.configs import CONFIGS

# Between them: grouped and latent attention, partly turned heads, experts, prediction, a tied head.
REPRESENTATIVES = ("glm4_moe", "deepseek_v3", "qwen3_moe", "llama3")


def orders(names: tuple[str, ...], ranks: int) -> tuple[str, ...]:
    return tuple(f"tests.engine.oracle:{name} on {ranks}" for name in names)


@pytest.mark.world
def test_every_family_on_one_rank():
    pytest.importorskip("megatron.core")
    assert not wrong(measured(orders(tuple(CONFIGS), 1), None, world=1), AGREES_WITH_DOUBLES)


@pytest.mark.world
def test_representatives_over_ranks():
    pytest.importorskip("megatron.core")
    assert not wrong(measured(orders(REPRESENTATIVES, 2), None), AGREES_WITH_DOUBLES)


@pytest.mark.releases
@pytest.mark.world
def test_every_minor(release_trees):
    found = {}
    for release in newest_of_each_minor(release_trees):
        tree = release_trees[release]
        for ranks in (1, 2):
            if bad := wrong(measured(orders(tuple(CONFIGS), ranks), tree, world=ranks), AGREES_WITH_DOUBLES):
                found[release, ranks] = bad
    assert not found
