"""Memory, processors, shared memory and limits, on both kinds of cgroup."""

import math

from bundle.environment.hardware import count_oom_kills, read_host_limits
from bundle.environment.machine import Machine
from tests.environment.machines import recorded


def test_cgroup_v1_limits_bind_from_above():
    limits = read_host_limits(recorded("cgroup-v1"))
    assert limits.memory.value == 8 * 2**30
    assert limits.memory.reason.endswith("/abc/memory.limit_in_bytes")
    assert limits.processors.value == 1.5


def test_shared_memory_without_a_size_is_half_of_the_memory():
    limits = read_host_limits(recorded("cgroup-v1"))
    assert limits.shared_memory.value == 24684096 * 1024 / 2


def test_the_last_mount_on_shm_counts():
    assert read_host_limits(recorded("h200-x2")).shared_memory.value == 268435456 * 1024


def test_limits_and_unlimited():
    limits = read_host_limits(recorded("h100-container"))
    assert (limits.locked_memory.value, limits.open_files.value, limits.stack.value) == (
        65536,
        20000,
        8388608,
    )
    assert read_host_limits(recorded("h200-x2")).locked_memory.value == math.inf


def test_the_limit_of_open_files_is_the_hard_one(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    for hard, value in (("524288", 524288), ("unlimited", math.inf)):
        (tmp_path / "proc/self/limits").write_text(
            f"Max open files            1024                 {hard}  files\n"
        )
        assert read_host_limits(Machine(tmp_path, {}, recorded("cgroup-v1").run)).open_files.value == value


def test_no_proc_is_unknown_not_an_error(tmp_path):
    limits = read_host_limits(Machine(tmp_path, {}, recorded("cgroup-v1").run))
    assert limits.memory.value is None
    assert "/proc/meminfo" in limits.memory.reason
    assert limits.processors.value is None


def test_hostile_files_are_unknown_not_an_error(tmp_path):
    proc = tmp_path / "proc/self"
    proc.mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_bytes(b"\xff\xfe MemTotal: many kB")
    (proc / "cgroup").write_text("no colons\n0::/a\n")
    (proc / "mountinfo").write_text("1 2 - \n 3 4 5 6 /sys/fs/cgroup rw - cgroup2\n")
    (proc / "status").write_text("Cpus_allowed_list:\tall\n")
    (proc / "limits").write_text("Max locked memory")
    limits = read_host_limits(Machine(tmp_path, {}, recorded("cgroup-v1").run))
    assert limits.memory.value is None
    assert limits.processors.value is None
    assert limits.locked_memory.value is None


def test_kills_for_want_of_memory_are_counted_where_the_kernel_tells(tmp_path):
    for name, text in {
        "proc/vmstat": "pgfault 12\noom_kill 4\n",
        "proc/self/cgroup": "0::/job\n",
        "proc/self/mountinfo": "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n",
        "sys/fs/cgroup/job/memory.events": "low 0\noom 3\noom_kill 2\noom_group_kill 0\n",
        "sys/fs/cgroup/memory.events": "oom_kill 1\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    machine = Machine(tmp_path, {}, recorded("cgroup-v1").run)
    assert count_oom_kills(machine) == 7
    assert count_oom_kills(recorded("h200-x2")) == 0
