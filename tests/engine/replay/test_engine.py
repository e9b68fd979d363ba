"""Recording and replaying on real megatron-core, in every layout and against one process."""

import json

import pytest
import torch

from tests.engine.replay.cases import CASES, MORE

LOSS, NORM = 1e-5, 1e-4  # relative


@pytest.mark.world
def test_every_layout_records_and_replays_as_one_process_does(core):
    cases = CASES if core.tree else CASES + MORE
    module = "tests.engine.replay.rank"
    alone = dict.fromkeys(f"reference:{case.reference.name}" for case in cases)
    references = json.loads(core.world.run(module, 1, *alone, timeout=300)[0])
    ranks = [
        json.loads(out) for out in core.world.run(module, 2, *(case.name for case in cases), timeout=300)
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
