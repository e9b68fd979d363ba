"""Probes of the host: by what machines wrote down, and by what is really here."""

import os
import shutil

import pytest

from bundle.environment.machine import DetectedValue, Machine, build_local_machine
from bundle.environment.packages import detect
from bundle.preflight import host, kernel, rdma, versions
from tests.environment.machines import FIXTURES, machine_at

XID = "[123.4] NVRM: Xid (PCI:0000:3b:00): {}, pid=1234, name=python, what it says"


def logging(tmp_path, *lines):
    """A machine whose kernel has logged these lines."""
    return Machine(tmp_path, {}, lambda command: DetectedValue("\n".join(lines), " ".join(command)))


@pytest.mark.parametrize("xid", [48, 79, 95])
def test_a_device_that_failed_is_in_the_kernels_log(tmp_path, xid, messages):
    line = XID.format(xid)
    found = kernel.probe(logging(tmp_path, "[1.0] all is well", line, line, "[2.0] usb 1-1: new device"))
    assert found.wrong.startswith("PCI 0000:3b:00: ") and found.wrong.count(line) == 1
    assert found.measured == {"lines": 4}
    messages(found.wrong)


def test_damaged_memory_of_the_host_is_in_it_and_many_failures_are_counted(tmp_path, messages):
    line = "Memory failure: 0x1: Killing python:77 due to hardware memory corruption"
    found = kernel.probe(logging(tmp_path, line))
    assert found.status == "failed" and line in found.wrong
    messages(found.wrong)
    lines = [XID.format(79).replace("3b", f"{n:02x}") for n in range(8)]
    found = kernel.probe(logging(tmp_path, *lines))
    assert sum(each in found.wrong for each in lines) == 4 and " 4 " in found.wrong.rpartition(";")[2]
    messages(found.wrong)


@pytest.mark.parametrize(
    "line", [XID.format(13), XID.format(43), XID.format(94), "Out of memory: Killed process 5 (python)", ""]
)
def test_what_is_a_programs_own_fault_is_not_against_the_node(tmp_path, line):
    assert kernel.probe(logging(tmp_path, line)).status == "passed"


def test_a_log_that_nobody_may_read_says_nothing(tmp_path):
    reason = "dmesg: Operation not permitted"
    found = kernel.probe(Machine(tmp_path, {}, lambda _: DetectedValue(None, reason)))
    assert (found.status, found.skipped) == ("skipped", reason)


def test_memory_that_is_free_here():
    free = host.probe(build_local_machine()).measured["GiB free"] * 2**30
    assert 0.5 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < free
    assert free < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("free", "status"), [(900, "failed"), (1100, "passed")])
def test_memory_that_another_job_holds_is_against_the_node(tmp_path, free, status):
    (tmp_path / "root/proc").mkdir(parents=True)
    (tmp_path / "root/proc/meminfo").write_text(f"MemTotal: 10000 kB\nMemAvailable: {free} kB\n")
    assert host.probe(machine_at(tmp_path)).status == status


def test_memory_of_which_nothing_is_said_is_skipped(tmp_path):
    assert host.probe(machine_at(tmp_path)).status == "skipped"


@pytest.fixture
def node(tmp_path):
    """A machine with two RDMA ports that are up, and what makes one of them go down."""
    shutil.copytree(FIXTURES / "h200-x2", tmp_path / "node")
    root = tmp_path / "node/root"
    shutil.rmtree(root / "sys/class/infiniband", ignore_errors=True)
    (root / "dev/infiniband").mkdir(parents=True, exist_ok=True)
    (root / "dev/infiniband/uverbs0").touch()
    for device in ("mlx5_0", "mlx5_1"):
        port = root / f"sys/class/infiniband/{device}/ports/1"
        port.mkdir(parents=True)
        for name, text in {"state": "4: ACTIVE", "link_layer": "InfiniBand", "rate": "400 Gb/sec"}.items():
            (port / name).write_text(text + "\n")

    def down(device):
        (root / f"sys/class/infiniband/{device}/ports/1/state").write_text("1: DOWN\n")

    return tmp_path / "node", down


def test_ports_that_are_up_are_named_and_one_that_is_down_is_counted(node, messages):
    directory, down = node
    assert rdma.probe(machine_at(directory)).measured == {"ports": 2, "ports up": 2}
    down("mlx5_1")
    found = rdma.probe(machine_at(directory))
    assert (found.status, found.measured) == ("passed", {"ports": 2, "ports up": 1})
    assert found.note.startswith("mlx5_0/1") and "mlx5_1" not in found.note
    messages(found.note)


def test_ports_of_which_none_can_be_used_are_against_the_node(node):
    directory, down = node
    shutil.rmtree(directory / "root/dev/infiniband")
    assert "uverbs" in rdma.probe(machine_at(directory)).wrong
    down("mlx5_0")
    down("mlx5_1")
    assert "2 down" in rdma.probe(machine_at(directory)).wrong


def test_a_machine_without_ports_is_skipped(tmp_path):
    assert rdma.probe(machine_at(tmp_path)).status == "skipped"


def test_what_doctor_would_have_fixed_is_against_the_node_and_the_driver_is_named():
    there = versions.probe(
        machine_at(FIXTURES / "h200-x2", {"CUDA_VISIBLE_DEVICES": "0,0"}), detect(), "cuda"
    )
    assert "names a device twice" in there.wrong
    there = versions.probe(machine_at(FIXTURES / "h200-x2"), detect(), "cuda")
    assert "driver 580" in there.note
