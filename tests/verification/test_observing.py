"""What is left of a run when it has been observed."""

import os
import time
from pathlib import Path

import pytest

from bundle.verification import (
    WorkOrder,
    build_needed_patch_plan,
    decide_patches,
    read_last_lines,
    run_orders,
)
from tests.world import observe


def running(process: int) -> bool:
    """Whether there is such a process; an ended one may wait a moment for whoever adopted it."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.world
def test_what_a_run_started_ends_with_it():
    pytest.importorskip("megatron.core")
    found = decide_patches("cpu")
    order = WorkOrder(0, "tests.verification.leaving:process", 1, 60, ())
    ((seen,),) = observe([order], build_needed_patch_plan(found), backend="cpu", root=found.core.root)
    assert seen.gap is not None, seen
    assert not running(int(seen.gap))


@pytest.mark.world
def test_what_has_ended_is_told_while_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("megatron.core")
    found, file = decide_patches("cpu"), tmp_path / "go on"
    monkeypatch.setenv("BUNDLE_TEST_WAITS_FOR", str(file))
    orders = [
        WorkOrder(n, f"tests.verification.leaving:{name}", 1, 60, ())
        for n, name in enumerate(("nothing", "wait"))
    ]
    told = run_orders(orders, build_needed_patch_plan(found), backend="cpu", root=found.core.root)
    first, (seen,) = next(told)
    assert (first.number, seen.gap) == (0, 0.0)
    file.touch()  # the other one has waited for this until now
    second, (seen,) = next(told)
    assert (second.number, seen.gap) == (1, 0.0)


def test_why_a_rank_ended_is_its_last_line_and_not_torch_npus(tmp_path: Path):
    of_torch_npu = (
        "[ERROR] 2026-11-22-20:52:56 (PID:7, Device:0, RankID:-1) ERR99999 UNKNOWN applicaiton exception"
    )
    reason = "EnvironmentUnfit: sees no NPU"
    (tmp_path / "0.err").write_text(f"Traceback:\n{reason}\n{of_torch_npu}\n")
    (tmp_path / "1.err").write_text("killed\n")
    (tmp_path / "2.err").write_text("")
    assert read_last_lines(tmp_path) == f"{reason} | killed"
