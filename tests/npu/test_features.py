"""What a run is beside its losses, on emulated NPUs and on the cpu: checkpoints, routes of experts."""

import json

import pytest

from tests.npu.test_training import SAME

pytestmark = pytest.mark.npu

STRETCHES = {
    "tp2": {"parallel": {"tp": 2, "ep": 2, "etp": 1}, "steps": 2, "save": "tp2"},
    "tp2 as pp2": {"parallel": {"pp": 2}, "steps": 2, "load": "tp2"},
}
REPLAYED = ("tp2 ep2 packed", "cp2 packed, recomputed", "pp2 vpp2 padded rows with mtp, recomputed")


def test_a_checkpoint_of_tp2_goes_on_as_pp2(both, tmp_path):
    mtp = not both.version.startswith("0.12.")  # which trains it not under tp2 (the trap mtp-tensor-parallel)
    for backend in ("npu", "cpu"):
        (tmp_path / backend).mkdir()
    for name, stretch in STRETCHES.items():  # in ranks of its own: 0.12 cannot forget its groups
        npu, cpu = (
            json.loads(
                world.run(
                    "tests.checkpoints.stretches",
                    2,
                    str(tmp_path / backend),
                    json.dumps({name: stretch | {"mtp": mtp}}),
                    timeout=1800,
                )[0].splitlines()[-1]
            )[name]
            for backend, world in (("npu", both.npu), ("cpu", both.cpu))
        )
        for ours, theirs in zip(npu["losses"], cpu["losses"], strict=True):
            assert ours == pytest.approx(theirs, rel=SAME), name
    assert npu["step"] == cpu["step"] == 2


def test_routes_are_recorded_and_replayed_as_on_the_cpu(both):
    """What must hold on one rank by itself is asserted there: see tests.engine.replay.rank."""
    npu, cpu = (
        json.loads(world.run("tests.engine.replay.rank", 2, *REPLAYED, timeout=1800)[0].splitlines()[-1])
        for world in (both.npu, both.cpu)
    )
    for case in REPLAYED:
        for kind in ("own", "foreign"):
            assert npu[case][kind] == pytest.approx(cpu[case][kind], rel=SAME), (case, kind)
        assert npu[case]["routes"] == cpu[case]["routes"], case
