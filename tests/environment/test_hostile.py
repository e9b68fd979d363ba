"""Whatever tools, files and variables say, detection finds a machine or says why not, and does it soon."""

import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bundle.environment.hardware import detect
from bundle.environment.machine import LARGEST_FILE, DetectedValue, Hardware, Machine, to_json_value
from bundle.environment.nvidia import QUERY_FIELDS
from bundle.errors import EnvironmentUnfit
from tests.environment.machines import FIXTURES, recorded

DIGITS = "9" * 5000  # Python refuses to read more than 4300
LONG = "x" * 140_000  # more than the csv module takes as one field
SECONDS = 5  # of this process; a machine as it should be takes a hundredth of that


class Mutated:
    """A recorded machine in which one pattern of every text is something else."""

    def __init__(self, name: str, pattern: str, instead: str, environ: dict[str, str]) -> None:
        self.pattern, self.instead = re.compile(pattern), instead
        self.original = recorded(name, environ)

    def text(self, said: DetectedValue[str]) -> DetectedValue[str]:
        if said.value is None:
            return said
        return DetectedValue(self.pattern.sub(lambda _: self.instead, said.value)[:LARGEST_FILE], said.reason)

    def machine(self) -> Machine:
        outer = self

        class Other(Machine):
            def read(self, path: str) -> DetectedValue[str]:
                return outer.text(super().read(path))

        of = self.original
        return Other(of.root, of.environ, lambda command: self.text(of.run(command)))


def found(machine: Machine, backend: str) -> Hardware | None:
    begun = time.process_time()
    try:
        hardware = detect(backend, machine)
        assert to_json_value(hardware)["backend"] == hardware.backend
        _ = (
            hardware.capability,
            hardware.oldest_generation,
            hardware.smallest_device_memory,
            hardware.unfit_reason,
        )
    except EnvironmentUnfit as error:
        hardware = None
        assert str(error)
    assert time.process_time() - begun < SECONDS
    return hardware


NAMES = sorted(path.name for path in FIXTURES.iterdir())
PATTERNS = [
    r"\d+",
    r"(?<=[ |:])\d+",
    r"\d+$",
    r"[A-Za-z]+",
    r"[,|:]",
    r"\n",
    r"/[a-z]+",
    r"(?m)^.*$",
    r"100000",
]
INSTEAD = [
    DIGITS,
    LONG,
    "",
    "0",
    "-1",
    "\0",
    "\x1b[31m",
    "٣",
    "²",
    "1.5",
    "[N/A]",
    '"',
    "," * 50,
    "/.." * 3000,
]
VALUES = st.text(st.sampled_from("0123456789,-+ GPUMIGall\t"), max_size=12) | st.sampled_from(
    [DIGITS, "0," * 60_000, LONG, "GPU-", "-1", "0,0", "\udcff"]
)


@settings(max_examples=200)
@given(
    st.sampled_from(NAMES),
    st.sampled_from(PATTERNS),
    st.sampled_from(INSTEAD) | st.text(max_size=4),
    st.dictionaries(
        st.sampled_from(["CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "ASCEND_HOME_PATH"]), VALUES
    ),
    st.sampled_from(["auto", "cpu", "cuda", "ascend"]),
)
@example("h200-x2", r"\d+", DIGITS, {}, "auto")
@example("h200-x2", r"NVIDIA H200", LONG, {}, "auto")
@example("cgroup-v1", r"/docker", "/\0", {}, "cpu")
@example("cgroup-v1", r"100000", "0", {}, "cpu")
@example("h200-x2", "nothing", "", {"CUDA_VISIBLE_DEVICES": DIGITS}, "auto")
@example("a2-24.1", "nothing", "", {"ASCEND_RT_VISIBLE_DEVICES": DIGITS}, "auto")
def test_any_answers_are_a_machine_or_a_reason(name, pattern, instead, environ, backend):
    found(Mutated(name, pattern, instead, environ).machine(), backend)


@pytest.mark.parametrize("visible", [None, "0," * 60_000 + "0", ",".join(map(str, range(20_000)))])
def test_a_tool_that_lists_a_hundred_thousand_devices_is_no_reason_to_wait(visible):
    rows = "\n".join(f"{n}, GPU-{n}, NVIDIA H200, 9.0, 143771, 580.1, Disabled" for n in range(100_000))
    assert rows.count(",", 0, rows.index("\n")) == len(QUERY_FIELDS) - 1
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    of = recorded("h200-x2", environ)
    hardware = found(Machine(of.root, environ, lambda _: DetectedValue(rows, "a test")), "cuda")
    assert hardware is None or len(hardware.devices) <= 1024


def test_a_file_without_an_end_is_not_read(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").symlink_to("/dev/zero")
    (tmp_path / "proc/self/limits").write_bytes(b"x" * (LARGEST_FILE + 1))
    limits = detect("cpu", Machine(tmp_path, {}, lambda _: DetectedValue(None, "none"))).host
    assert limits.memory.value is None and "proc/meminfo" in limits.memory.reason
    assert limits.stack.value is None and str(LARGEST_FILE) in limits.stack.reason
