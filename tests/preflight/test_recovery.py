"""nvidia-resiliency-ext as it answers: a class that logs what is wrong. The real one was run on an H200."""

import sys
from collections.abc import Iterator

import pytest

from bundle.preflight import recovery

# As its version 0.4.1 has them: what it logs, and what it returns.
PACKAGE = """
import logging
class GPUHealthCheck:
    enabled = {enabled}
    def __call__(self):
        if {says!r}:
            logging.getLogger(__name__).warning({says!r})
        return {healthy}
"""
RESET = "GPU 3: Requires a reset to recover. Terminate GPU processes and reset the GPU."
OLD = "Health checks disabled: GPU driver version r535 is older than required r570 for the GPU Recovery API."


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """A package of that name is of one test alone."""
    yield
    for name in [name for name in sys.modules if name.startswith("nvidia_resiliency_ext")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("enabled", "says", "healthy", "status"),
    [
        (True, "", True, "passed"),
        (True, RESET, False, "failed"),
        (True, "", False, "failed"),
        (False, OLD, True, "skipped"),
        (False, "", True, "skipped"),
    ],
)
def test_what_its_health_check_says_is_told(tmp_path, monkeypatch, enabled, says, healthy, status, messages):
    package = tmp_path / "nvidia_resiliency_ext/shared_utils"
    package.mkdir(parents=True)
    (package / "health_check.py").write_text(PACKAGE.format(enabled=enabled, says=says, healthy=healthy))
    monkeypatch.syspath_prepend(tmp_path)
    found = recovery.probe()
    told = found.wrong or found.skipped
    assert found.status == status and told == (says or told)
    messages(told)


def test_where_it_is_not_installed_nothing_is_said_against_a_node(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", None)
    found = recovery.probe()
    assert found.status == "skipped" and "nvidia-resiliency-ext" in found.skipped
