"""Every decision about the megatron-core of other projects, against the truth.

$MEGATRON_PROJECTS names a folder of bare clones of what pins Megatron-LM, forks it or applies a diff to it.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.history.decided import Decided
from tests.history.git import SINCE, Repository
from tests.history.tally import WRONG, Row, Truth
from tests.history.test_history import GIT
from tests.history.users import branches, changed, changes, judged, pinned

pytestmark = pytest.mark.releases
FOLDER = os.environ.get("MEGATRON_PROJECTS")
PROJECTS = sorted(Path(FOLDER).iterdir()) if FOLDER else []


@pytest.fixture(scope="module")
def upstream() -> Iterator[Repository]:
    if not GIT:
        pytest.skip("MEGATRON_HISTORY names no bare clone of Megatron-LM")
    opened = Repository(Path(GIT))
    yield opened
    opened.close()


@pytest.fixture
def project(path: Path) -> Iterator[Repository]:
    opened = Repository(path)
    yield opened
    opened.close()


def supported(repository: Repository, ref: str) -> str | None:
    """The commit, if the repository has it and it is not older than the oldest release that is supported."""
    commit = repository.head(ref)
    return commit if commit and repository.ask("log", "-1", "--format=%cs", commit) >= SINCE else None


def decided(repository: Repository, commits: list[str]) -> list[Row]:
    decide, truth = Decided(repository), Truth(repository)
    return [Row(c, entry, action, truth(c, entry)) for c in commits for entry, action in decide(c).items()]


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.name)
def test_nothing_is_decided_wrongly(upstream: Repository, project: Repository):
    fork = [head for head in branches(project) if supported(project, head)]
    rows = decided(project, fork)
    if not fork:
        rows = decided(upstream, [c for ref in sorted(pinned(project)) if (c := supported(upstream, ref))])
        for ref, diff in sorted(changes(project)):
            commit = supported(upstream, ref)
            rows += judged(changed(upstream, commit, diff)) if commit else ()
    if not rows:
        pytest.skip("it names no commit of Megatron-LM that is supported")
    wrong = [row for row in rows if row.verdict == WRONG]
    assert not wrong, (len(rows), len(wrong), wrong[:5])
