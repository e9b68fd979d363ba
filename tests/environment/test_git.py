"""Reading HEAD without git, against what git itself says."""

import subprocess
from pathlib import Path

import pytest

from bundle.environment import search

SHA = "0123456789abcdef0123456789abcdef01234567"


def run_git(directory: Path, *args: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
    command = ["git", *identity, *args]
    return subprocess.run(command, cwd=directory, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    tree.mkdir()
    run_git(tree, "init")
    run_git(tree, "commit", "--allow-empty", "-m", "one")
    return tree


def test_branch(checkout: Path):
    assert search.read_commit(checkout) == run_git(checkout, "rev-parse", "HEAD")


def test_packed_branch(checkout: Path):
    head = run_git(checkout, "rev-parse", "HEAD")
    run_git(checkout, "pack-refs", "--all")
    assert list((checkout / ".git/refs/heads").iterdir()) == []
    assert search.read_commit(checkout) == head


def test_detached(checkout: Path):
    head = run_git(checkout, "rev-parse", "HEAD")
    run_git(checkout, "checkout", "--detach")
    assert search.read_commit(checkout) == head


def test_worktree(checkout: Path, tmp_path: Path):
    run_git(checkout, "worktree", "add", str(tmp_path / "other"), "-b", "side")
    run_git(tmp_path / "other", "commit", "--allow-empty", "-m", "two")
    assert search.read_commit(tmp_path / "other") == run_git(tmp_path / "other", "rev-parse", "HEAD")
    assert search.read_commit(tmp_path / "other") != search.read_commit(checkout)


def test_a_directory_inside_a_checkout_is_no_checkout(checkout: Path):
    (checkout / "inside").mkdir()
    assert search.read_commit(checkout / "inside") is None


@pytest.mark.parametrize(
    "head", ["", "ref: refs/../../secret", "ref: HEAD", "zz" * 20, "ref: refs/heads/none"]
)
def test_a_broken_head_names_no_commit(tmp_path: Path, head: str):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/HEAD").write_text(head)
    (tmp_path / "secret").write_text(SHA)
    assert search.read_commit(tmp_path) is None
