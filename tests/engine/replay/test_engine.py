"""Recording and replaying on real megatron-core, in every layout and against one process."""

import json
import os
from pathlib import Path

import pytest
import torch

from tests import world
from tests.engine.replay.cases import CASES, MORE, Case
from tests.matrix.test_layouts import newest_of_each_minor

LOSS, NORM = 1e-5, 1e-4  # relative


def check(tree: Path | None, cases: tuple[Case, ...]) -> None:
    """Runs all cases in one pair of processes and their references in one more process."""
    path = [str(Path.cwd()), *([str(tree)] if tree else []), os.environ.get("PYTHONPATH", "")]
    environ = {"PYTHONPATH": os.pathsep.join(path), "GLOO_SOCKET_IFNAME": "lo"}
    module = "tests.engine.replay.rank"
    alone = dict.fromkeys(f"reference:{case.reference.name}" for case in cases)
    references = json.loads(world.run(module, 1, *alone, timeout=300, environ=environ)[0])
    ranks = [
        json.loads(out)
        for out in world.run(module, 2, *(case.name for case in cases), timeout=300, environ=environ)
    ]
    for case in cases:
        wanted, here = references[case.reference.name], ranks[0][case.name]
        for kind in ("own", "foreign"):
            *losses, norm = wanted[kind]
            assert here[kind] == pytest.approx([*losses, norm], rel=NORM), (case.name, kind)
            assert here[kind][:-1] == pytest.approx(losses, rel=LOSS), (case.name, kind)
        recorded, expected = (torch.tensor(x["routes"]) for x in (here, wanted))
        assert (recorded == expected).float().mean() > 0.99, case.name
        if "ep" not in case.parallel or "tp" in case.parallel:  # else each rank has other micro-batches
            assert ranks[1][case.name] == here, case.name


@pytest.mark.world
def test_default_release():
    check(None, CASES + MORE)


@pytest.mark.releases
@pytest.mark.world
def test_every_minor(release_trees):
    for version in newest_of_each_minor(release_trees):
        check(release_trees[version], CASES)
