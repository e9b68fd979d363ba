"""A tree that its owner, or somebody with worse in mind, has broken: decided in time, and never wrongly."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bundle.environment.packages import InstalledPackages
from bundle.patches import PatchAction
from bundle.patches.megatron_core import load_review_table as load_table
from bundle.patches.megatron_core import resolve_core_path_or_version
from bundle.patches.plan import Survey, survey_patches
from tests.patches.test_plan import EMPTY

LIMIT = 10.0  # seconds of CPU
MTP = "megatron/core/transformer/multi_token_prediction.py"
# Its target and evidence are in that one file, and 0.16.1 has the defect.
PATCH = "mtp-packed-roll-boundaries"

Attack = Callable[[Path], object]


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def loop(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def looped_folder(file: Path) -> None:
    shutil.rmtree(file.parent)
    file.parent.symlink_to(file.parent.name)


def compiled(file: Path) -> None:
    file.rename(file.with_suffix(".pyc"))


def binary(file: Path) -> None:
    file.unlink()
    file.with_suffix(".cpython-311-x86_64-linux-gnu.so").write_bytes(b"\x7fELF")


def long_head(root: Path) -> None:
    (root / ".git").mkdir()
    (root / ".git/HEAD").write_bytes(b"a" * 10_000_000)


def replaced(text: str | bytes) -> Attack:
    def attack(file: Path) -> None:
        file.unlink()  # a hard link of the release's
        file.write_bytes(text.encode() if isinstance(text, str) else text)

    return attack


# What is done to the file that the patch's target is in.
BROKEN: dict[str, Attack] = {
    "a pipe": pipe,
    "a folder": folder,
    "a link to itself": loop,
    "a folder that links to itself": looped_folder,
    "nothing": lambda file: file.unlink(),
    "only its compiled form": compiled,
    "an extension module": binary,
    "empty": replaced(""),
    "no Python": replaced("def ("),
    "Python 2": replaced("print 'roll_tensor'\n"),
    "zeros": replaced(b"\0" * 4096),
    "UTF-16": replaced("def roll_tensor(): pass\n".encode("utf-16")),
    "an unknown encoding": replaced(b"# coding: none-such\n"),
    "no encoding that it says": replaced(b"x = '\xe9'\n"),
    "nested 5,000 deep": replaced("(" * 5000 + ")" * 5000),
    "100,000 signs": replaced("x = " + "-" * 100_000 + "1\n"),
    "200,000 sums": replaced("x = " + "1+" * 200_000 + "1\n"),
    "50,000 attributes": replaced("x = a" + ".b" * 50_000 + "\n"),
    "3,000 branches": replaced("if a: pass\n" + "elif a: pass\n" * 3000),
    "100 MB": replaced(b"#" * 100_000_000),
}
INFO = "megatron/core/package_info.py"
# What is done to the tree around it, which says nothing about the patch.
AROUND: dict[str, Attack] = {
    "no package_info": lambda root: (root / INFO).unlink(),
    "a computed version": lambda root: replaced("MAJOR = int('0')\n")(root / INFO),
    "a number of 6,000 digits": lambda root: replaced(f"MAJOR = {'9' * 6000}\nMINOR = PATCH = 1\n")(
        root / INFO
    ),
    "no init": lambda root: (root / "megatron/core/__init__.py").unlink(),
    "a .git that names itself": lambda root: (root / ".git").write_text("gitdir: .git\n"),
    "a .git that points out": lambda root: (root / ".git").write_text("gitdir: ../../../../etc\n"),
    "a HEAD of 10 MB": long_head,
    "a garbage dist-info": lambda root: (root / "megatron_core-0.16.1.dist-info").write_bytes(b"\xff"),
}


@pytest.fixture(scope="module")
def source(release, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release whose file differs from every reviewed one: it is read, not looked up."""
    root = tmp_path_factory.mktemp("source")
    tree(release("0.16.1"), root)
    text = (root / MTP).read_text()
    replaced(text + "\n\nUNKNOWN = 1\n")(root / MTP)
    return root


def tree(of: Path, root: Path) -> None:
    """A copy by hard links, in a moment."""
    skipped = shutil.ignore_patterns("*.pyc", "__pycache__")
    shutil.copytree(of / "megatron/core", root / "megatron/core", copy_function=os.link, ignore=skipped)


def decided(root: Path) -> Survey:
    features = frozenset({"mtp", "packed", "mla", "moe", "attention-fused", "bf16", "dp", "cp"})
    started = time.process_time()
    stack: InstalledPackages = EMPTY
    found = survey_patches(
        resolve_core_path_or_version(str(root), load_table()),
        load_table(),
        stack,
        backend="cuda",
        features=features,
    )
    assert time.process_time() - started < LIMIT
    return found


def action(found: Survey, patch: str = PATCH) -> PatchAction:
    (decision,) = (decision for decision in found.decisions if decision.id == patch)
    return decision.action


@pytest.fixture(scope="module")
def before(source: Path) -> dict[str, PatchAction]:
    """What is decided about the tree as it was."""
    found = {decision.id: decision.action for decision in decided(source).decisions}
    assert found[PATCH] is PatchAction.APPLY
    return found


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_leaves_its_patches_undecided_and_no_others(source, before, tmp_path: Path, what: str):
    tree(source, tmp_path)
    BROKEN[what](tmp_path / MTP)
    found = decided(tmp_path)
    assert action(found) is PatchAction.DRIFT
    now = {d.id: d.action for d in found.decisions}
    changed = {id for id in before if before[id] is not now[id]}
    assert {now[id] for id in changed} <= {PatchAction.DRIFT}, {id: now[id] for id in changed}
    if what != "a folder that links to itself":  # in which much more is
        assert all("mtp" in id or "packed" in id or "recompute" in id for id in changed), changed


@pytest.mark.parametrize("what", AROUND)
def test_what_lies_around_changes_no_decision(source, before, tmp_path: Path, what: str):
    tree(source, tmp_path)
    AROUND[what](tmp_path)
    assert {d.id: d.action for d in decided(tmp_path).decisions} == before


@pytest.mark.parametrize("name", ["two words", "a\nb", "caf\udce9", "-n", "a'b\"c"])
def test_a_place_of_any_name_is_read_and_its_name_is_no_terminal_s(source: Path, tmp_path: Path, name: str):
    tree(source, tmp_path / name)
    found = decided(tmp_path / name)
    assert action(found) is PatchAction.APPLY and "\n" not in found.core.origin


def test_a_link_to_a_tree_and_a_folder_inside_it_are_the_tree(source: Path, tmp_path: Path, monkeypatch):
    (tmp_path / "link").symlink_to(source)
    monkeypatch.chdir(source)
    for place in (tmp_path / "link", source / "megatron/core", Path("megatron")):
        assert action(decided(place)) is PatchAction.APPLY


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable for root")
@pytest.mark.parametrize("part", [MTP, "megatron/core/transformer"])
def test_what_may_not_be_read_is_undecided(source: Path, tmp_path: Path, part: str):
    tree(source, tmp_path)
    copy = tmp_path / part
    if copy.is_file():
        replaced(copy.read_bytes())(copy)
    copy.chmod(0)
    try:
        assert action(decided(tmp_path)) is PatchAction.DRIFT
    finally:
        copy.chmod(0o755)
