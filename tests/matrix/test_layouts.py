"""Every layout trains as one process does, in the default release and in those under $BUNDLE_RELEASES."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

from tests.matrix.cases import Case, larger_layouts, layouts
from tests.world import World

LOSS, NORM = 1e-5, 1e-4  # relative

Seen = dict[str, list[list[float]]]


def train(size: int, cases: Sequence[Case], world: World) -> Seen:
    """What rank 0 of `size` ranks saw: case -> per step [main loss, MTP loss, gradient norm]."""
    chosen = json.dumps([asdict(case) for case in cases])
    seen: Seen = json.loads(world.run("tests.matrix.rank", size, chosen, timeout=300)[0].splitlines()[-1])
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


def check(release: str, tree: Path | None, names: tuple[str, ...] = ()) -> None:
    """Trains the named layouts (or all) in one pair of processes, and the model alone in one more.

    They import megatron after their patches, as a job does.
    """
    compare([case for case in layouts(release) if not names or case.name in names], 2, tree)


def compare(cases: Sequence[Case], ranks: int, tree: Path | None) -> None:
    references = list({case.reference.name: case.reference for case in cases}.values())
    with World(tree) as world:
        alone, together = train(1, references, world), train(ranks, cases, world)
    wrong = {
        case.name: found
        for case in cases
        if (found := differences(together[case.name], alone[case.reference.name]))
    }
    assert not wrong


@pytest.mark.world
def test_default_release():
    check(metadata.version("megatron-core"), None)


@pytest.mark.world
@pytest.mark.parametrize("which", [0, -1], ids=["oldest", "newest"])
def test_oldest_and_newest_minor(release_trees, which):
    version = newest_of_each_minor(release_trees)[which]
    check(version, release_trees[version], ("tp2", "pp2 vpp2", "cp2", "tp2 ep2", "pp2 laid out"))


@pytest.mark.world
@pytest.mark.slow
def test_layouts_of_four_ranks():
    """MTP in a stage before the head; experts that are cut and spread."""
    compare(larger_layouts(metadata.version("megatron-core")), 4, None)


@pytest.mark.matrix
@pytest.mark.world
def test_every_minor(release_trees, proven):
    for version in newest_of_each_minor(release_trees):
        check(version, release_trees[version])
        compare(larger_layouts(version), 4, release_trees[version])
        proven("every layout trains as one process does", core=version)


def newest_of_each_minor(trees: dict[str, Path]) -> list[str]:
    return list({Version(version).release[:2]: version for version in trees}.values())
