"""$MUST_HAVE: packages that no test may be skipped for, so that no CI turns green by losing one."""

import os
import re
from collections.abc import Generator
from typing import Any

import pytest

VARIABLE = "MUST_HAVE"  # names of top-level packages, with blanks between: "torch megatron"
HAS_PASSED = pytest.StashKey[bool]()  # of a test that has run: neither failed nor skipped


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    """The report of a module that is not collected because it misses one of them: a failure."""
    return _judged((yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """The report of a test that is skipped because it misses one of them: a failure."""
    report = _judged((yield))
    if call.when == "call":
        item.stash[HAS_PASSED] = report.passed
    return report


def _judged(report: Any) -> Any:
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        missed = re.search(r"could not import '(\w+)", reason)
        if missed and missed[1] in os.environ.get(VARIABLE, "").split():
            report.outcome = "failed"
            report.longrepr = f"{reason}\n{VARIABLE} names {missed[1]}: install it, or do not ask for it"
    return report
