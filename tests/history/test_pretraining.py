"""Megatron-LM's own programs on this machine's CPU, with and without the patches: `make foreign TREE=FOLDER`.

FOLDER has a clone of NVIDIA/Megatron-LM; a release tag of it is unpacked and runs as it is. Not in it, and
taken from the wheel of the same release, is the compiled index builder of its data.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bundle.patches.catalogue import PATCHES
from tests.history.test_foreign import FORK, FRAMEWORKS, UPSTREAM, megatron, repository, unpacked
from tests.patches.trees import Release

pytestmark = pytest.mark.releases
PREDICTING = Path(__file__).with_name("predicting.py")
COUNT, RATIO = "mtp-loss-context-parallel-count", "mtp-loss-context-parallel-normalisation"
# release -> what mends it; from 0.18 on the script wants Python 3.12
VERSIONS = {"0.16.1": COUNT, "0.17.1": RATIO}
_SAID = """
    --transformer-impl local --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 64
    --max-position-embeddings 64 --position-embedding-type rope --micro-batch-size 1 --global-batch-size 1
    --mtp-num-layers 1 --mtp-loss-scaling-factor 1.0 --attention-dropout 0 --hidden-dropout 0 --lr 1e-3
    --train-iters 1 --eval-iters 0 --eval-interval 100 --mock-data --split 100,0,0 --num-workers 0
    --tokenizer-type NullTokenizer --vocab-size 1023 --no-gradient-accumulation-fusion --no-persist-layer-norm
    --no-masked-softmax-fusion --no-rope-fusion --log-interval 1 --tensorboard-log-interval 1
"""
ARGUMENTS = _SAID.split()


@pytest.fixture
def checkout(version: str, release: Release, tmp_path: Path) -> Path:
    """The tag of a release, with the index builder that is compiled in its wheel."""
    pytest.importorskip("six")  # which 0.16 and earlier import and nobody declares
    upstream = repository(UPSTREAM)
    tag = f"core_v{version}"
    if not upstream.head(tag):
        pytest.skip(f"the clone of Megatron-LM has no tag {tag}")
    top = upstream.ask("ls-tree", "--name-only", tag).split()
    folders = [name for name in top if name.endswith(".py") or name == "megatron"]
    root = unpacked(upstream, tag, tmp_path / "tree", *folders, "examples/run_simple_mcore_train_loop.py")
    data = root / "megatron/core/datasets"
    for built in (release(version) / "megatron/core/datasets").glob("helpers_cpp*.so"):
        (data / built.name).write_bytes(built.read_bytes())
    (data / "Makefile").write_text("default:\n")
    return root


def ran(
    script: Path, size: int, before: Sequence[str], arguments: Sequence[str] = (), path: Path | None = None
) -> list[str]:
    """What each of so many ranks of a program printed, on a search path; all of them must end well."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    known = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if path is not None:
        known["PYTHONPATH"] = os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "bundle.patched", *before, str(script), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=script.parent,  # it may write a checkpoint there
            env={**os.environ, **known, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(size)
    ]
    printed = [rank.communicate(timeout=900)[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(text[-3000:] for text in printed)
    return printed


def norm(checkout: Path, size: int, *vouched: str) -> tuple[float, list[str]]:
    """The gradients' norm of the first step of pretrain_gpt.py, context parallel, and what was printed."""
    board = checkout.parent / f"board-{size}-{len(vouched)}"
    before = ["--backend", "cpu", "--features", "mtp,cp"]
    before += [word for patch in vouched for word in ("--vouch", patch)]
    arguments = (*ARGUMENTS, "--context-parallel-size", str(size), "--tensorboard-dir", str(board))
    printed = ran(checkout / "pretrain_gpt.py", size, before, arguments)
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulators.EventAccumulator(str(board))
    events.Reload()
    return events.Scalars("grad-norm")[0].value, printed


@pytest.mark.parametrize("version", VERSIONS)
def test_gradients_of_megatrons_own_training_script_are_those_of_one_rank(version: str, checkout: Path):
    alone, _ = norm(checkout, 1)
    without, _ = norm(checkout, 2)
    enabled, printed = norm(checkout, 2, VERSIONS[version])
    assert without == pytest.approx(alone, rel=0.05) and abs(without / alone - 1) > 3e-4
    assert enabled == pytest.approx(alone, rel=1e-5)
    assert f"APPLY {VERSIONS[version]}" in printed[0] and "APPLY" not in printed[1]


@pytest.mark.parametrize("version", ["0.16.1"])
def test_megatrons_quick_start_runs_on_two_ranks(version: str, checkout: Path):
    said = ("--backend", "cpu", "--features", "tp")
    printed = ran(checkout / "examples/run_simple_mcore_train_loop.py", 2, said, path=checkout)
    assert all("Losses reduced" in text and "Successfully loaded" in text for text in printed)


@pytest.mark.parametrize("framework", ["slime", "miles"])
def test_labels_that_a_fork_takes_apart_still_train_its_prediction_layers(framework: str, tmp_path: Path):
    """As in stock megatron-core, but for labels: with every patch that fits, and without."""
    tree = megatron(framework, repository(FRAMEWORKS[framework][0]), tmp_path / "tree")
    if framework == "miles":  # its fork imports a package of its own
        unpacked(repository(FORK), FRAMEWORKS[framework][2], tree, "miles_megatron_plugins")
    applied = [patch.id for patch in PATCHES if patch.replacements and "mtp" in patch.when]
    vouching = [word for patch in applied for word in ("--vouch", patch)]
    (without,), (enabled,) = (
        ran(PREDICTING, 1, ["--backend", "cpu", "--features", "mtp", *said], path=tree)
        for said in ((), vouching)
    )
    norms = [[float(n) for n in text.rpartition("norms ")[2].split()] for text in (without, enabled)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6) and norms[0][0] > 1e-3, norms
    assert "APPLY mtp-per-token-weight" in enabled and "UNVOUCHED mtp-per-token-weight" in without
