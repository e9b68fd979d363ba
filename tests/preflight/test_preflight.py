"""Probes that find something wrong, or nothing, or never answer."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bundle import preflight
from bundle.environment.hardware import build_preset, detect
from bundle.environment.machine import Level
from bundle.launch.rendezvous import Rendezvous
from bundle.preflight import (
    DEVICE,
    DISK,
    Probe,
    ProbeResult,
    build_findings,
    build_node_probes,
    build_report,
    mark_slow_devices,
    run_probes,
)

HERE = "tests.preflight.probe"


def probe(*words: str, subject: str = "device 0", module: str = HERE) -> Probe:
    return Probe(subject, module, words, "leave it out")


def of(*found: ProbeResult) -> list[tuple[Level, str]]:
    asked = {probe(subject=f"device {n}"): each for n, each in enumerate(found)}
    return [(finding.level, finding.cause) for finding in build_findings(mark_slow_devices(asked))]


def test_a_device_that_is_slower_than_its_neighbours_is_told(messages):
    usual = [ProbeResult({"TFLOP/s": 600.0 + n}) for n in range(7)]
    told = of(*usual, ProbeResult({"TFLOP/s": 500.0}))
    assert told[:7] == [(Level.OK, f"{600 + n} TFLOP/s") for n in range(7)]
    level, cause = told[7]
    assert level is Level.FAIL and "500 TFLOP/s" in cause and "603" in cause
    messages(cause)
    assert of(ProbeResult({"TFLOP/s": 1.0}), ProbeResult({"TFLOP/s": 0.95})) == [
        (Level.OK, "1 TFLOP/s"),
        (Level.OK, "0.95 TFLOP/s"),
    ]
    assert of(ProbeResult({"TFLOP/s": 0.85}), ProbeResult({"TFLOP/s": 1.0}))[0][0] is Level.FAIL


@pytest.mark.parametrize(("of_which", "wrong"), [("h200", "device 0"), ("cpu", "")])
def test_processes_that_share_their_processors_are_not_compared(of_which, wrong, tmp_path, monkeypatch):
    unequal = {probe(subject=f"device {n}"): ProbeResult({"TFLOP/s": 1.0 + n}) for n in range(2)}
    monkeypatch.setattr(preflight, "run_probes", lambda *_: unequal)
    monkeypatch.setattr(preflight, "measure_links", lambda *_, **__: {})
    where = Rendezvous(1, 0, "127.0.0.1", None, "", "")
    asked = preflight.NodeCheck(build_preset(of_which, 2), tmp_path, where, quick=True, devices=2, wait=1.0)
    assert asked.own_defects.startswith(wrong) and bool(asked.own_defects) == bool(wrong)


def test_what_a_probe_finds_wrong_is_told_with_what_to_do():
    (finding,) = build_findings({probe(): ProbeResult({"TFLOP/s": 600.0}, "a product is wrong")})
    assert finding == ("device 0", Level.FAIL, "a product is wrong", "leave it out")


@pytest.mark.parametrize(
    ("does", "wrong"),
    [
        ("well", ""),
        ("wrong", "it is wrong"),
        ("sleep", "no answer within 2 s"),
        ("crash", "its probe ended with SIGSEGV: nothing said"),
        ("fail", "its probe ended with code 1: RuntimeError: no such device"),
    ],
)
def test_a_probe_that_breaks_or_never_answers_is_wrong(does, wrong):
    asked = probe(does)
    found = run_probes([asked], 2.0 if does == "sleep" else 120.0)[asked]
    assert found.wrong == wrong
    assert found.seconds >= (2.0 if does == "sleep" else 0.01)


def test_a_probe_is_not_waited_for_while_what_it_started_holds_its_output():
    began = time.monotonic()
    asked = probe("leave")
    # Time enough to start it, on a busy machine too.
    assert run_probes([asked], 12.0)[asked].wrong == "no answer within 12 s"
    assert time.monotonic() - began < 60


def test_lines_of_libraries_are_not_what_a_probe_found():
    asked = probe("chatter")
    assert run_probes([asked], 120.0)[asked].measured == {"TFLOP/s": 1.0}


def test_what_a_node_came_to_has_status_and_what_to_do():
    bad, good, none = (probe(subject=name) for name in ("a", "b", "c"))
    wrong, right, skipped = (
        ProbeResult(wrong="broken", seconds=2.5),
        ProbeResult({"GiB free": 3.0}),
        ProbeResult(skipped="why"),
    )
    told = build_report("cpu", {bad: wrong, good: right, none: skipped})
    assert told["passed"] is False and told["backend"] == "cpu" and told["node"]
    assert told["probes"] == [
        {
            "name": "a",
            "status": "failed",
            "seconds": 2.5,
            "measured": {},
            "cause": "broken",
            "fix": "leave it out",
        },
        {
            "name": "b",
            "status": "passed",
            "seconds": 0.0,
            "measured": {"GiB free": 3.0},
            "cause": "",
            "fix": "",
        },
        {"name": "c", "status": "skipped", "seconds": 0.0, "measured": {}, "cause": "why", "fix": ""},
    ]
    assert build_report("cpu", {good: right, none: skipped})["passed"] is True


BACKENDS = {"cuda": "h200", "ascend": "a3", "cpu": "cpu"}


def test_devices_that_have_to_be_there_are_asked_be_they_seen_or_not():
    asked = build_node_probes(build_preset("h200", 7), Path("/runs"), quick=True, devices=8)
    assert [each.arguments[1] for each in asked if each.module == DEVICE] == [str(n) for n in range(8)]


def test_every_device_is_asked_and_the_disk_of_the_runs():
    asked = list(build_node_probes(build_preset("h200", 8), Path("/runs"), quick=True))
    assert [each.arguments for each in asked if each.module == DEVICE] == [
        ("cuda", str(n), "quick") for n in range(8)
    ]
    assert [each.arguments[0] for each in asked if each.module == DISK] == ["/runs", "/dev/shm"]
    assert [each.subject for each in build_node_probes(detect("cpu"), Path(), quick=False)][:2] == [
        "device 0",
        "disk",
    ]


def test_the_driver_of_gpus_alone_is_asked_whether_they_must_be_recovered():
    asked = {
        backend: build_node_probes(build_preset(name, 8), Path(), quick=True)
        for backend, name in BACKENDS.items()
    }
    assert [b for b, every in asked.items() if "recovery" in [each.subject for each in every]] == ["cuda"]


def test_a_disk_that_cannot_be_written_is_told(tmp_path, monkeypatch, messages):
    from bundle.preflight import disk

    lay: list[list[Path]] = []
    monkeypatch.setattr(os, "fsync", lambda _: lay.append(list(tmp_path.iterdir())))
    assert disk.probe_write_speed(tmp_path, 1 << 22).measured["MB/s written"] > 0
    assert list(tmp_path.iterdir()) == [] and lay == [[]]  # nothing is left behind by who is killed there
    wrong = disk.probe_write_speed(tmp_path / "none", 1 << 20).wrong
    assert wrong.startswith(f"{tmp_path / 'none'}: ")
    messages(wrong)
    assert disk.probe_write_speed(Path("/proc"), 1 << 20).wrong.startswith("/proc: ")


def test_a_device_that_computes_wrong_is_told(monkeypatch, messages):
    torch = pytest.importorskip("torch")
    from bundle.preflight import device

    monkeypatch.setitem(device._MATRIX_SIZES, "cpu", 128)
    right = device.probe("cpu", 0, 0.0)
    assert right.wrong == "" and right.measured["TFLOP/s"] > 0
    answers = iter([True, False])
    monkeypatch.setattr(torch, "equal", lambda *_: next(answers))
    wrong = device.probe("cpu", 0, 0.0).wrong
    assert "product 2 " in wrong
    messages(wrong)


@pytest.mark.slow
@pytest.mark.world
def test_this_node_is_fit(tmp_path):
    command = [
        sys.executable,
        "-m",
        "bundle",
        "preflight",
        "--backend=cpu",
        "--devices-per-node=2",
        "--directory",
        str(tmp_path),
        "--json",
    ]
    # As long as a busy machine needs: the quick one has its limit.
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = {each["name"]: each for each in json.loads(done.stdout)["probes"]}
    assert told["device 0"]["measured"]["TFLOP/s"] > 0
    for local, other in ((0, 1), (1, 0)):
        measured = told[f"links of device {local}"]["measured"]
        units = {f"GB/s from device {other}", f"us from device {other}", "GB/s all-reduce", "GB/s all-to-all"}
        assert set(measured) == units and all(value > 0 for value in measured.values())
    assert {"disk", "shared memory", "host memory", "kernel log", "rdma", "versions"} < set(told)
    assert all(each["seconds"] > 0 and each["status"] != "failed" for each in told.values())


@pytest.mark.parametrize("directory", ["/nonexistent"])
def test_a_node_that_is_not_fit_ends_with_3(directory, monkeypatch):
    import typer

    from bundle.cli import preflight as verb

    monkeypatch.setattr(
        preflight, "build_node_probes", lambda *_, **__: [Probe("disk", DISK, (directory, "1048576"), "x")]
    )
    with pytest.raises(typer.Exit) as ended:
        verb.preflight(
            directory=Path(directory),
            quick=True,
            backend="cpu",
            as_json=False,
            devices_per_node=None,
            log_level="",
        )
    assert ended.value.exit_code == 3
