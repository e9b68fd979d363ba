"""Ranks of tests fail with the release, the case and the rank, in time, and leave the next run alone."""

import time
from pathlib import Path

import pytest

from tests.world import World

pytestmark = pytest.mark.world


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    tree: Path = tmp_path_factory.mktemp("trees") / "0.99.1"
    with World(tree) as made:
        assert made.run("tests.falling", 1, "ends") == ["ended\n"]
        yield made


def failure(world: World, *words: str, timeout: float = 300) -> str:
    """What is said of two ranks that fail."""
    begun = time.monotonic()
    with pytest.raises(AssertionError) as error:
        world.run("tests.falling", 2, *words, timeout=timeout)
    assert time.monotonic() - begun < 120
    return str(error.value)


def test_a_rank_that_dies_takes_the_others_along_and_is_named(world):
    said = failure(world, "ends", "dies")
    heading, *_ = said.splitlines()
    assert "dies" in heading and "0.99.1" in heading
    assert "rank 1 ended with 3" in said and "rank 0 ended with -9" in said


def test_ranks_that_never_end_are_ended(world):
    said = failure(world, "sleeps", timeout=1)
    assert "rank 0 ended with -9" in said and "rank 1 ended with -9" in said


def test_an_error_says_in_which_case_it_was(world):
    said = failure(world, "ends", "raises")
    assert "ArithmeticError" in said and "case that raises" in said


def test_a_world_goes_on_after_a_failure(world):
    failure(world, "raises")
    assert world.run("tests.falling", 2, "ends") == ["ended\n", "ended\n"]
