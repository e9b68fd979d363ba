"""The thin edge: what a command that is missing, fails or hangs turns into; and the named machines."""

import sys
import time

import pytest

from bundle.environment import machine
from bundle.environment.hardware import PRESET_NAMES, build_preset
from bundle.errors import UsageError
from tests.launch.launched import gone


def test_output_of_a_command():
    said = machine.run_command([sys.executable, "-c", "print('hi')"])
    assert said.value == "hi\n"


def test_a_missing_command_says_so(messages):
    said = machine.run_command(["no-such-tool", "-x"])
    assert said.value is None and said.reason.startswith("no-such-tool ")
    messages(said.reason)


def test_a_failing_command_says_why():
    said = machine.run_command([sys.executable, "-c", "import sys; sys.exit('No devices were found')"])
    assert said.value is None
    assert " 1: No devices" in said.reason


def test_a_hanging_command_is_given_up(monkeypatch):
    monkeypatch.setattr(machine, "TIMEOUT_SECONDS", 0.2)
    said = machine.run_command([sys.executable, "-c", "import time; time.sleep(30)"])
    assert said.value is None
    assert "timed out" in said.reason


def test_a_tool_whose_child_keeps_its_output_open_is_given_up_with_the_child(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "TIMEOUT_SECONDS", 1.0)
    begun = time.monotonic()
    said = machine.run_command(["/bin/sh", "-c", f"sleep 67 & echo $! > {tmp_path}/pid; exec sleep 68"])
    assert said.value is None and "timed out" in said.reason
    assert time.monotonic() - begun < 30
    assert gone([int((tmp_path / "pid").read_text())])


def test_a_tool_that_talks_without_end_is_given_up(messages):
    said = machine.run_command(["yes", "NVIDIA H100"])
    assert said.value is None
    assert "`yes NVIDIA H100`" in said.reason and "1048576" in said.reason
    messages(said.reason)


def test_what_a_tool_says_cannot_move_the_cursor():
    said = machine.run_command(["printf", r"\033[1mGPU 0\033[0m\tok\033]0;title\007\r\302\233\377\n"])
    assert said.value == "GPU 0\tok\ufffd]0;title\ufffd\ufffd\ufffd\ufffd\n"


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_named_machines_say_where_their_numbers_are_from(name):
    hardware = build_preset(name)
    assert (hardware.backend == "cpu") == (not hardware.devices)
    for device in hardware.devices:
        assert device.memory.value
        assert "#" in device.memory.reason or "driver" in device.memory.reason


def test_named_machines_take_another_number_of_devices():
    assert len(build_preset("h200", 2).devices) == 2
    assert build_preset("a3").oldest_generation.value == "a3"
    assert build_preset("b200").capability == (10, 0)


def test_an_unknown_name_lists_the_known(messages):
    with pytest.raises(UsageError, match="a100, h100") as error:
        build_preset("tpu")
    messages(error.value)
