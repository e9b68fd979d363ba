"""What is told: with time, level and rank; as much as was asked for; by other ranks only what is wrong."""

import logging
import os
import re

import pytest

from bundle import log
from bundle.errors import UsageError
from tests.command import run_bundle

LINE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (\w+) ([^:]+): (.*)"


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    logger = logging.getLogger("bundle")
    kept = logger.handlers, logger.propagate, logger.level
    monkeypatch.delenv(log.LEVEL_VARIABLE, raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    yield
    logger.handlers, logger.propagate, logger.level = kept
    logger.setLevel(kept[2])


def told(capsys):
    """(level, who, message) of every line on stdout, and on stderr, after one message of each level."""
    logger = logging.getLogger("bundle.some.module")
    for level in log.LEVEL_CHOICES:
        getattr(logger, level)("a %s", level)
    return [re.findall(LINE, stream) for stream in capsys.readouterr()]


def names(lines):
    return [level.lower() for level, _, _ in lines]


def test_a_command_tells_on_stderr_from_info_on(capsys):
    log.start()
    out, err = told(capsys)
    assert out == [] and names(err) == ["info", "warning", "error"]
    assert err[0] == ("INFO", "mcore-bundle", "a info")


@pytest.mark.parametrize(
    ("rank", "level", "expected"),
    [
        (0, None, ["info", "warning", "error"]),
        (1, None, ["warning", "error"]),
        (0, "error", ["error"]),
        (3, "error", ["error"]),
        (0, "debug", ["debug", "info", "warning", "error"]),
        (7, "debug", ["debug", "info", "warning", "error"]),
    ],
)
def test_a_rank_tells_on_stdout_which_rank_it_is(capsys, rank, level, expected):
    if level:
        log.choose_level(level)
    log.start(rank)
    out, err = told(capsys)
    assert err == [] and names(out) == expected
    assert {who for _, who, _ in out} == {f"rank {rank}"}


def test_a_rank_of_a_command_is_told_the_level_by_its_environment(capsys):
    log.choose_level("warning")
    assert os.environ[log.LEVEL_VARIABLE] == "warning"
    _, err = told(capsys)
    assert names(err) == ["warning", "error"]


def test_nothing_is_told_twice(capsys):
    logging.getLogger().addHandler(handler := logging.StreamHandler())
    handler.setFormatter(logging.Formatter("2026-01-01 00:00:00 INFO root: %(message)s"))
    try:
        log.start()
        log.start()
        _, err = told(capsys)
    finally:
        logging.getLogger().removeHandler(handler)
    assert len(err) == 3


def test_a_level_that_is_none_is_a_usage_error(monkeypatch, messages):
    with pytest.raises(UsageError, match="'loud'") as error:
        log.choose_level("loud")
    assert all(level in str(error.value) for level in log.LEVEL_CHOICES)
    messages(error.value)
    monkeypatch.setitem(os.environ, log.LEVEL_VARIABLE, "LOUD")
    with pytest.raises(UsageError, match=log.LEVEL_VARIABLE) as error:
        log.start(0)
    messages(error.value)


@pytest.mark.parametrize(
    "verb", ["doctor --backend cpu", "plan demo", "train demo --dry-run", "patches plan"]
)
def test_a_verb_is_told_how_much_to_tell(verb):
    ran = run_bundle(*verb.split(), "--log-level", "loud", timeout=60)
    assert ran.returncode == 2 and "--log-level: 'loud' " in ran.stderr
    ran = run_bundle(*verb.split(), "--log-level", "debug", timeout=60)
    assert ran.returncode in (0, 3), ran.stderr
    assert all(re.fullmatch(LINE, line) for line in ran.stderr.splitlines())
