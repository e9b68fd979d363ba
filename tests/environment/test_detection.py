"""Which machine each recorded one is taken for, and what cannot be taken for any."""

import json

import pytest

from bundle.environment.hardware import detect
from bundle.environment.machine import to_json_value
from bundle.errors import EnvironmentUnfit
from tests.environment.machines import machine_at, merged, recorded

GIB = 2**30


def test_two_h200s():
    hardware = detect(machine=recorded("h200-x2"))
    assert hardware.backend == "cuda"
    assert [device.name for device in hardware.devices] == ["NVIDIA H200"] * 2
    assert hardware.capability == (9, 0)
    assert hardware.smallest_device_memory.value == 143771 * 2**20
    assert hardware.driver.value == "580.159.04"
    assert hardware.link.value == "NV18"
    assert hardware.rdma.value == ()
    assert "2 of 2 GPUs" in hardware.reason


def test_order_of_the_variable_is_the_order_of_the_devices():
    hardware = detect(machine=recorded("h200-x2", {"CUDA_VISIBLE_DEVICES": "1,0"}))
    assert [(device.index, device.number) for device in hardware.devices] == [(0, 1), (1, 0)]


@pytest.mark.parametrize("silent", [(), ("nvidia-smi",)])
def test_without_nvidia_smi_the_driver_files_tell_less_but_not_otherwise(silent, messages):
    hardware = detect(machine=recorded("h200-x2", silent=silent))
    assert [device.identity[:12] for device in hardware.devices] == ["GPU-9ab8988a", "GPU-9b8f4456"]
    assert hardware.driver.value == "580.159.04"
    assert (hardware.capability is None) == bool(silent)
    assert (hardware.smallest_device_memory.value is None) == bool(silent)
    if silent:
        assert "nvidia-smi" in hardware.smallest_device_memory.reason
        messages(hardware.smallest_device_memory.reason)


def test_a_container_with_rdma_and_limits():
    hardware = detect(machine=recorded("h100-container"))
    assert len(hardware.devices) == 8
    (port,) = hardware.rdma.value or ()
    assert port.startswith("mlx5_0/1: ") and "NDR" in port
    assert hardware.host.shared_memory.value == 64 * 2**20
    assert hardware.host.memory.value == 1024 * GIB
    assert hardware.host.processors.value == 15.5


def test_mig_is_one_device():
    hardware = detect(machine=recorded("a100-mig"))
    (device,) = hardware.devices
    assert device.name.startswith("NVIDIA A100") and device.name.endswith("MIG 3g.40gb")
    assert hardware.smallest_device_memory.value == 40 * 10**9
    assert any("MIG" in note for note in hardware.notes)


def test_a2():
    hardware = detect(machine=recorded("a2-24.1"))
    assert (hardware.backend, len(hardware.devices)) == ("ascend", 8)
    assert hardware.oldest_generation.value == "a2"
    assert hardware.toolkit.value == "8.3.RC1"
    assert hardware.driver.value == "24.1.rc2.2"
    assert hardware.capability is None


def test_a3_takes_the_toolkit_of_the_environment_and_the_driver_of_the_header():
    hardware = detect(machine=recorded("a3-26.0", {"ASCEND_HOME_PATH": "/usr/local/Ascend/cann-9.0.0"}))
    assert hardware.oldest_generation.value == "a3"
    assert hardware.toolkit.value == "9.0.0"
    assert hardware.driver.value == "26.0.rc2"
    assert hardware.link.value == "HCCS_SW"
    assert hardware.smallest_device_memory.value == 64 * GIB


def test_nodes_count_where_npu_smi_lists_more(messages):
    hardware = detect(machine=recorded("a3-one-die"))
    assert len(hardware.devices) == 1
    assert hardware.oldest_generation.value == "a3"
    assert any("npu-smi" in note for note in hardware.notes)
    assert any("davinci_manager" in note for note in hardware.notes)
    messages("\n".join(hardware.notes))


def test_nodes_without_npu_smi():
    hardware = detect(machine=recorded("a2-24.1", silent=["npu-smi"]))
    assert len(hardware.devices) == 8
    assert hardware.oldest_generation.value is None
    assert "npu-smi" in hardware.oldest_generation.reason


def test_a_310_is_named_and_its_health_too():
    hardware = detect(machine=recorded("310p"))
    assert hardware.oldest_generation.value == "310"
    assert any("Warning" in note for note in hardware.notes)


def test_none_is_cpu_with_the_reason():
    hardware = detect(machine=recorded("cgroup-v1"))
    assert (hardware.backend, hardware.devices) == ("cpu", ())
    assert "no /dev/nvidia<N>" in hardware.reason
    assert "no /dev/davinci<N>" in hardware.reason


def test_hidden_devices_are_cpu_with_the_reason(messages):
    hardware = detect(machine=recorded("h200-x2", {"CUDA_VISIBLE_DEVICES": ""}))
    assert hardware.backend == "cpu"
    assert "2 GPUs" in hardware.reason and "CUDA_VISIBLE_DEVICES" in hardware.reason
    messages(hardware.reason)


def test_cpu_asked_for_looks_at_no_accelerator():
    assert detect("cpu", recorded("h200-x2")).backend == "cpu"


def test_both_kinds_are_refused_with_what_to_set(tmp_path):
    both = merged(tmp_path, "h200-x2", "a3-26.0")
    with pytest.raises(EnvironmentUnfit) as error:
        detect(machine=machine_at(both))
    for part in ("2 GPUs", "4 NPUs", "backend: cuda", "ASCEND_RT_VISIBLE_DEVICES=", "CUDA_VISIBLE_DEVICES="):
        assert part in str(error.value)
    assert detect("ascend", machine_at(both)).backend == "ascend"
    assert detect(machine=machine_at(both, {"CUDA_VISIBLE_DEVICES": "-1"})).backend == "ascend"


def test_all_refused_variables_are_named_at_once(tmp_path):
    environ = {"CUDA_VISIBLE_DEVICES": "0,0", "ASCEND_RT_VISIBLE_DEVICES": "1,0"}
    with pytest.raises(EnvironmentUnfit) as error:
        detect(machine=machine_at(merged(tmp_path, "h200-x2", "a3-26.0"), environ))
    assert len(error.value.violations) == 2


def test_a_backend_without_its_device_is_unfit(messages):
    with pytest.raises(EnvironmentUnfit, match="ascend") as error:
        detect("ascend", recorded("h200-x2"))
    messages(error.value)


@pytest.mark.parametrize(
    "name", ["h200-x2", "h100-container", "a100-mig", "a2-24.1", "a3-26.0", "310p", "cgroup-v1"]
)
def test_every_machine_is_json(name):
    assert json.loads(json.dumps(to_json_value(detect(machine=recorded(name))), allow_nan=False))["reason"]
