"""What nvidia-smi says when something is wrong with a GPU."""

import pytest

from bundle.environment.machine import DetectedValue, Machine
from bundle.environment.nvidia import QUERY_COMMAND, find


def machine(tmp_path, rows, environ=None):
    def run(command):
        return (
            DetectedValue(rows, "nvidia-smi")
            if tuple(command) == QUERY_COMMAND
            else DetectedValue(None, "not recorded")
        )

    return Machine(tmp_path, environ or {}, run)


def test_cells_without_a_number_become_the_reason(tmp_path, messages):
    rows = "0, GPU-1, NVIDIA GB10, [N/A], [N/A], 580.95.05, [N/A]\n"
    device = find(machine(tmp_path, rows)).devices[0]
    for detected, column in ((device.memory, "memory.total"), (device.generation, "compute_cap")):
        assert detected.value is None and column in detected.reason and "[N/A]" in detected.reason
        messages(detected.reason)


@pytest.mark.parametrize("noise", ["", "Warning: infoROM is corrupted at gpu 0000:0D:00.0\n", "a,b,c\n"])
def test_lines_that_are_no_rows_are_left_out(tmp_path, noise):
    rows = noise + "0, GPU-1, NVIDIA H200, 9.0, 143771, 580.159.04, Disabled\n" + noise
    assert find(machine(tmp_path, rows)).present == 1


def test_different_gpus_in_another_order_are_noted(tmp_path):
    rows = (
        "0, GPU-1, NVIDIA A100-SXM4-80GB, 8.0, 81920, 535.1, Disabled\n"
        "1, GPU-2, NVIDIA H100 80GB HBM3, 9.0, 81559, 535.1, Disabled\n"
    )
    assert find(machine(tmp_path, rows)).notes
    assert not find(machine(tmp_path, rows, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})).notes


def test_device_nodes_without_a_driver_are_no_gpus(tmp_path, messages):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    found = find(machine(tmp_path, None))
    assert found.present == 0
    messages(found.reason)
