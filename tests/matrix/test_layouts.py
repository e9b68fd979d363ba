"""Every layout trains as one process does, in the default release and in those under $BUNDLE_RELEASES."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from packaging.version import Version

from tests.matrix.cases import Case, layouts

ROOT = Path(__file__).parents[2]
LOSS, NORM = 1e-5, 1e-4  # relative

Seen = dict[str, list[list[float]]]


def train(directory: Path, world: int, cases: list[Case], tree: Path | None) -> Seen:
    """What rank 0 of `world` ranks saw: case -> per step [main loss, MTP loss, gradient norm]."""
    results, store = directory / f"results-{world}", directory / f"store-{world}"
    given = os.environ.get("PYTHONPATH")
    path = [str(ROOT), *([str(tree)] if tree else []), *([given] if given else [])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    chosen = json.dumps([asdict(case) for case in cases])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.matrix.rank", str(r), str(world), str(store), str(results), chosen],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=(directory / f"stderr-{world}-{r}").open("wb"),
        )
        for r in range(world)
    ]
    try:
        codes = [rank.wait(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    logs = [(directory / f"stderr-{world}-{r}").read_text()[-3000:] for r in range(world)]
    assert codes == [0] * world, "\n".join(logs)
    seen: Seen = json.loads(results.read_text())
    return seen


def differences(seen: list[list[float]], reference: list[list[float]]) -> list[str]:
    """Where a layout's numbers leave the reference's by more than the bounds."""
    found = []
    for step, (ours, theirs) in enumerate(zip(seen, reference, strict=True)):
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            bound = NORM if index == len(theirs) - 1 else LOSS
            if not abs(a - b) <= bound * abs(b):
                found.append(f"step {step} value {index}: {a:.7g} is not {b:.7g}")
    return found


def check(directory: Path, release: str, tree: Path | None, names: tuple[str, ...] = ()) -> None:
    """Trains the named layouts (or all) in one pair of processes, and the model alone in one more."""
    cases = [case for case in layouts(release) if not names or case.name in names]
    references = list({case.reference.name: case.reference for case in cases}.values())
    alone = train(directory, 1, references, tree)
    together = train(directory, 2, cases, tree)
    wrong = {
        case.name: found
        for case in cases
        if (found := differences(together[case.name], alone[case.reference.name]))
    }
    assert not wrong


@pytest.mark.world
def test_default_release(tmp_path):
    from importlib.metadata import version

    check(tmp_path, version("megatron-core"), None)


def newest_of_each_minor(trees: dict[str, Path]) -> list[str]:
    return list({Version(version).release[:2]: version for version in trees}.values())


@pytest.mark.world
@pytest.mark.parametrize("which", [0, -1], ids=["oldest", "newest"])
def test_oldest_and_newest_minor(tmp_path, release_trees, which):
    version = newest_of_each_minor(release_trees)[which]
    check(tmp_path, version, release_trees[version], ("tp2", "pp2 vpp2", "cp2", "tp2 ep2"))


@pytest.mark.matrix
@pytest.mark.world
def test_every_minor(tmp_path, release_trees):
    for version in newest_of_each_minor(release_trees):
        directory = tmp_path / version
        directory.mkdir()
        check(directory, version, release_trees[version])
