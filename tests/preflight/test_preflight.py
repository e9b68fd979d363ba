"""Probes that find something wrong, or nothing, or never answer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bundle import preflight
from bundle.environment.hardware import detect, preset
from bundle.environment.machine import Level
from bundle.preflight import DEVICE, DISK, Found, Probe, findings, probes, run

HERE = "tests.preflight.probe"


def probe(*words: str, subject: str = "device 0", module: str = HERE) -> Probe:
    return Probe(subject, module, words, "leave it out")


def of(*found: Found) -> list[tuple[Level, str]]:
    asked = {probe(subject=f"device {n}"): each for n, each in enumerate(found)}
    return [(finding.level, finding.cause) for finding in findings(asked)]


def test_a_device_that_is_slower_than_its_neighbours_is_told():
    usual = [Found({"TFLOP/s": 600.0 + n}) for n in range(7)]
    told = of(*usual, Found({"TFLOP/s": 500.0}))
    assert told[:7] == [(Level.OK, f"{600 + n} TFLOP/s") for n in range(7)]
    assert told[7] == (Level.FAIL, "computes 500 TFLOP/s, its neighbours 602")
    assert of(Found({"TFLOP/s": 1.0}), Found({"TFLOP/s": 0.95})) == [
        (Level.OK, "1 TFLOP/s"),
        (Level.OK, "0.95 TFLOP/s"),
    ]


def test_what_a_probe_finds_wrong_is_told_with_what_to_do():
    (finding,) = findings({probe(): Found({"TFLOP/s": 600.0}, "a product is wrong")})
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
    assert run([asked], 2.0 if does == "sleep" else 120.0)[asked].wrong == wrong


def test_every_device_is_asked_and_the_disk_of_the_runs():
    asked = list(probes(preset("h200", 8), Path("/runs"), quick=True))
    assert [each.words for each in asked if each.module == DEVICE] == [
        ("cuda", str(n), "quick") for n in range(8)
    ]
    assert [each.words[0] for each in asked if each.module == DISK] == ["/runs", "/dev/shm"]
    assert [each.subject for each in probes(detect("cpu"), Path(), quick=False)][:2] == ["device 0", "disk"]


def test_a_disk_that_cannot_be_written_is_told(tmp_path):
    from bundle.preflight import disk

    assert disk.probe(tmp_path, 1 << 22).measured["MB/s written"] > 0
    assert list(tmp_path.iterdir()) == []
    assert disk.probe(tmp_path / "none", 1 << 20).wrong == f"{tmp_path / 'none'}: No such file or directory"
    assert disk.probe(Path("/proc"), 1 << 20).wrong.startswith("/proc: ")


def test_a_device_that_computes_wrong_is_told(monkeypatch):
    torch = pytest.importorskip("torch")
    from bundle.preflight import device

    monkeypatch.setitem(device._SIZES, "cpu", 128)
    right = device.probe("cpu", 0, 0.0)
    assert right.wrong == "" and right.measured["TFLOP/s"] > 0
    answers = iter([True, False])
    monkeypatch.setattr(torch, "equal", lambda *_: next(answers))
    assert device.probe("cpu", 0, 0.0).wrong == "a product of matrices is wrong, the 2. of its kind"


@pytest.mark.world
def test_this_node_is_fit(tmp_path):
    command = [
        sys.executable,
        "-m",
        "bundle",
        "preflight",
        "--backend=cpu",
        "--directory",
        str(tmp_path),
        "--json",
    ]
    # As long as a busy machine needs: the quick one has its limit.
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["measured"]["device 0"]["TFLOP/s"] > 0


@pytest.mark.parametrize("directory", ["/nonexistent"])
def test_a_node_that_is_not_fit_ends_with_3(directory, monkeypatch):
    import typer

    from bundle.cli import preflight as verb

    monkeypatch.setattr(
        preflight, "probes", lambda *_, **__: [Probe("disk", DISK, (directory, "1048576"), "x")]
    )
    with pytest.raises(typer.Exit) as ended:
        verb.preflight(directory=Path(directory), quick=True, backend="cpu", as_json=False, log_level="")
    assert ended.value.exit_code == 3
