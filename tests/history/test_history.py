"""Every decision over Megatron-LM's history against the truth; $MEGATRON_HISTORY names a bare clone of it."""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from bundle.patches.catalogue import PATCHES
from bundle.patches.definitions import Definitions
from bundle.patches.megatron_core import load_commits_by_target_fingerprint
from tests.history.decided import Decided
from tests.history.git import CommitTree, Repository
from tests.history.tally import BRANCHES, WRONG, Row, Truth, held_out, rows, undecided
from tools.patches import review

pytestmark = pytest.mark.releases
GIT = os.environ.get("MEGATRON_HISTORY")


@pytest.fixture(scope="module")
def repository() -> Iterator[Repository]:
    if not GIT:
        pytest.skip("MEGATRON_HISTORY names no bare clone of Megatron-LM")
    opened = Repository(Path(GIT))
    yield opened
    opened.close()


@cache
def decided(repository: Repository) -> dict[str, list[Row]]:
    """Every decision about every held-out commit, by branch."""
    deciding, truth = Decided(repository), Truth(repository)
    held = held_out(repository)
    return {branch: rows(repository, commits, deciding, truth) for branch, commits in held.items()}


@pytest.mark.parametrize("branch", BRANCHES)
def test_nothing_is_decided_wrongly(repository: Repository, branch: str):
    if branch not in decided(repository):
        pytest.skip(f"there is no branch {branch}")
    wrong = [row for row in decided(repository)[branch] if row.verdict == WRONG]
    assert not wrong, (len(wrong), wrong[:5])


@pytest.mark.parametrize("branch", ["main", "dev"])
def test_little_is_left_undecided(repository: Repository, branch: str):
    if branch not in decided(repository):
        pytest.skip(f"there is no branch {branch}")
    patches = {patch.id for patch in PATCHES}  # a trap is never undecided: it would lower the share
    of = [row for row in decided(repository)[branch] if row.entry in patches]
    assert undecided(of) <= 0.05


def test_code_read_in_a_commit_is_there(repository: Repository):
    by_signature = review.declared()[1]
    for target, known in load_commits_by_target_fingerprint().items():
        for fingerprint, said in known.items():
            commit = said.split()[0]
            found = Definitions(CommitTree(Path(commit), repository=repository, commit=commit))[target]
            assert found is not None
            assert fingerprint == (
                found.signature_fingerprint if target in by_signature else found.fingerprint
            ), commit
