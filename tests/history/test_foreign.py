"""Audits of the megatron-core that frameworks pin, beside their own code: `make foreign TREE=FOLDER`.

The folder has git clones by their names (FOLDER/Megatron-LM, or FOLDER/THUDM/slime), bare or not; what is not
there is skipped by name. What is said is held against tests/history/truth.py, which knows the defects by the
words of the files, and against what was found by hand in these frameworks.
"""

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from bundle.environment.packages import InstalledPackages
from bundle.environment.search import build_search_path
from bundle.patches.audit import ENTRIES, Audit, DefectStatus, audit
from bundle.patches.entry import LOCAL_LAYER_BACKENDS, Patch
from bundle.patches.megatron_core import load_review_table, resolve_core_path_or_version
from tests.history.git import Repository
from tests.history.truth import PRESENT
from tests.history.users import changes

pytestmark = pytest.mark.releases
TREE = os.environ.get("TREE")
UPSTREAM, FORK = "NVIDIA/Megatron-LM", "radixark/Megatron-LM"
# framework -> (its repository, what of it is put on the path, where it says which Megatron-LM)
FRAMEWORKS = {
    "slime": ("THUDM/slime", ("slime", "slime_plugins"), "docker/patch/latest/megatron.patch"),
    "miles": ("radixark/miles", ("miles", "miles_plugins"), "miles-main"),
    "verl": ("volcengine/verl", ("verl",), "core_v0.15.0"),  # docker/Dockerfile.stable.vllm
    "Megatron-Bridge": ("NVIDIA-NeMo/Megatron-Bridge", ("src",), "3rdparty/Megatron-LM"),
    "NeMo RL": (
        "NVIDIA-NeMo/RL",
        ("nemo_rl",),
        "3rdparty/Megatron-Bridge-workspace/Megatron-Bridge",
    ),
    "Primus": ("AMD-AGI/Primus", ("primus",), "third_party/Megatron-LM"),
    "mcore-bridge": ("modelscope/mcore-bridge", ("src",), "core_v0.16.1"),  # one of those that it supports
}
# Findings of NVIDIA/Megatron-LM#7452 and their neighbours that no release had mended in August 2026.
OPEN = {
    "label-smoothing-over-ranks",
    "loss-of-gathered-logits",
    "mtp-loss-context-parallel-normalisation",
    "mtp-recompute-groups",
    "padding-mask-stages",
    "cross-attention-groups",
    "llava-groups",
    "attention-sinks-norm",
    "padding-mask-own-count",
    "gated-delta-norm-gradient",
    "fsdp-checkpoint-stages",
    "expert-bias-counts",
    "balancing-of-prompts",
    "balancing-of-packs",
    "mla-rotary-key-gradient",
    "mla-query-norm-gradient",
}
# framework -> what was read there by hand: entries by their standing; None: it is not there
READ: dict[str, dict[str, str | None]] = {
    "slime": {
        "mtp-without-labels": None,  # asks for mtp_kwargs["mtp_labels"]
        "mtp-packed-full-recompute": None,  # passes tensors only
        "restricted-unpickle": "present",  # its patch puts weights_only=False back
    },
    "miles": {"mtp-without-labels": None, "mtp-packed-full-recompute": None},
    "verl": {
        "mla-thd-value-padding": "mended",  # verl/models/mcore/patch.py
        "mtp-without-labels": "conditional",  # verl/models/mcore/mtp_patch.py, for the models of its actor
    },
    "Megatron-Bridge": {"padding-mask-expert-bias": "mended"} | dict.fromkeys(OPEN),
    "mcore-bridge": {"mla-thd-value-padding": "mended", "mla-rotary-key-gradient": "mended"},
}


def repository(name: str) -> Repository:
    """The clone of a repository; skips the test where there is none."""
    if not TREE:
        pytest.skip("TREE names no folder of clones: make foreign TREE=FOLDER")
    for place in (Path(TREE, name), Path(TREE, name.rpartition("/")[2])):
        for git in (place / ".git", place):
            if (git / "objects").is_dir():
                return Repository(git)
    pytest.skip(f"{name} is not in {TREE}")


def unpacked(of: Repository, commit: str, root: Path, *folders: str) -> Path:
    """A directory with these folders of a commit."""
    command = ["git", "--git-dir", str(of.path), "archive", commit, *folders]
    archive = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(root, filter="data")
    return root


def link(of: Repository, commit: str, path: str) -> str:
    """The commit of a submodule."""
    return of.ask("rev-parse", f"{commit}:{path}").strip()


def megatron(framework: str, own: Repository, root: Path) -> Path:
    """The Megatron-LM that the head of a framework pins, with what it changes of it."""
    where = FRAMEWORKS[framework][2]
    if framework == "miles":
        return unpacked(repository(FORK), where, root, "megatron/core")
    commit, upstream = where, repository(UPSTREAM)
    if where.endswith(".patch"):
        ((commit, diff),) = [c for c in changes(own) if c[1] == own.text(own.blob("HEAD", where) or "")][:1]
        unpacked(upstream, commit, root, "megatron/core")
        command = ["git", "apply", "--include=megatron/core/*", "-"]
        subprocess.run(command, cwd=root, input=diff, check=True, capture_output=True)
        return root
    if framework == "NeMo RL":
        bridge = repository("NVIDIA-NeMo/Megatron-Bridge")
        commit = link(bridge, link(own, "HEAD", where), "3rdparty/Megatron-LM")
    elif "/" in where:
        commit = link(own, "HEAD", where)
    return unpacked(upstream, commit, root, "megatron/core")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nothing_is_said_that_is_not_so_and_nothing_is_missed(framework: str, tmp_path: Path):
    name, folders, _ = FRAMEWORKS[framework]
    own = repository(name)
    tree = megatron(framework, own, tmp_path / "megatron")
    top = unpacked(own, "HEAD", tmp_path / "framework", *folders)
    path = build_search_path([str(top / "src") if "src" in folders else str(top)], "", tmp_path)
    found = audit(
        resolve_core_path_or_version(str(tree), load_review_table()),
        load_review_table(),
        InstalledPackages(path),
        None,
    )
    assert framework in {package.name for package in found.frameworks}
    standings = {defect.entry.id: defect.status.value for defect in found.defects}
    assert not _wrong(found, tree)
    for entry, expected in READ.get(framework, {}).items():
        if entry in OPEN and expected is None:
            assert standings.get(entry) in ("present", "unknown"), entry
        else:
            assert standings.get(entry) == expected, entry
    unknown = [entry for entry, standing in standings.items() if standing == "unknown"]
    assert len(unknown) <= 6, unknown


def _wrong(found: Audit, tree: Path) -> list[str]:
    """What is said to be there and is not, or the other way round, but for what a framework replaces."""
    said = {defect.entry.id: defect for defect in found.defects}
    wrong = []
    for entry in ENTRIES:
        if set(entry.backends) <= set(LOCAL_LAYER_BACKENDS) or (isinstance(entry, Patch) and entry.opt_in):
            continue
        there, defect = PRESENT[entry.id](lambda module: _text(tree, module)), said.get(entry.id)
        if defect is None and there:
            wrong.append(f"{entry.id} is missed")
        if (
            defect is not None
            and not there
            and not defect.patched_by
            and defect.status is DefectStatus.PRESENT
        ):
            wrong.append(f"{entry.id} is not there")
    return wrong


def _text(tree: Path, module: str) -> str:
    file = tree / "megatron/core" / f"{module.replace('.', '/')}.py"
    return file.read_text() if file.is_file() else ""
