"""What of a machine is worth a warning, and what no job survives."""

import pytest

from bundle.environment.doctor import check_machine
from bundle.environment.hardware import detect
from bundle.environment.machine import DetectedValue, Level
from tests.environment.machines import recorded


def findings(hardware):
    return [finding for finding in check_machine(hardware) if finding.level is not Level.OK]


def test_a_good_machine_has_nothing_to_fix():
    assert findings(detect(machine=recorded("h200-x2"))) == []
    assert findings(detect(machine=recorded("cgroup-v1"))) == []


def test_a_tight_container():
    found = findings(detect(machine=recorded("h100-container")))
    assert {finding.subject for finding in found} == {"shared memory", "locked memory"}
    assert "64.0 MiB" in next(f.cause for f in found if f.subject == "shared memory")
    assert "64.0 KiB" in next(f.cause for f in found if f.subject == "locked memory")


@pytest.mark.parametrize(
    ("limit", "value", "subject"),
    [
        ("processors", 1.0, "processors"),
        ("open_files", 1024.0, "open files"),
        ("shared_memory", None, "shared memory"),
    ],
)
def test_one_limit_too_low_is_one_warning(limit, value, subject):
    hardware = detect(machine=recorded("h200-x2"))
    host = hardware.host._replace(**{limit: DetectedValue(value, "a test")})
    (finding,) = findings(hardware._replace(host=host))
    assert (finding.subject, finding.level) == (subject, Level.WARN)
    assert "a test" in finding.cause
    assert finding.fix


@pytest.mark.parametrize(("devices", "most_nodes"), [(2, 336), (0, 505)])
def test_open_files_are_compared_with_the_connections_of_all_ranks_and_nodes(devices, most_nodes):
    hardware = detect(machine=recorded("h200-x2"))
    host = hardware.host._replace(open_files=DetectedValue(1024.0, "a test"))
    (finding,) = findings(hardware._replace(host=host, devices=hardware.devices[:devices]))
    assert f" {most_nodes} nodes of {max(devices, 1)} ranks" in finding.cause


def test_an_inference_card_cannot_train(messages):
    (failed,) = [f for f in findings(detect(machine=recorded("310p"))) if f.level is Level.FAIL]
    assert failed.cause.startswith("310P3 ")
    messages(failed.cause)


def test_what_a_missing_tool_would_have_said_is_unknown():
    found = findings(detect(machine=recorded("h200-x2", silent=["nvidia-smi"])))
    (cause,) = [finding.cause for finding in found if finding.subject == "links"]
    assert "nvidia-smi" in cause
