"""Megatron-LM's own programs on this machine's CPU, with and without the patches: `make foreign TREE=FOLDER`.

FOLDER has a clone of NVIDIA/Megatron-LM; a release tag of it is unpacked and runs as it is. Not in it, and
taken from the wheel of the same release, is the compiled index builder of its data.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bundle.patches.catalogue import PATCHES
from tests.history.test_foreign import FORK, FRAMEWORKS, UPSTREAM, megatron, repository, unpacked
from tests.patches.test_external_program import PREDICTING
from tests.patches.trees import Release

pytestmark = pytest.mark.releases
COUNT, RATIO = "mtp-loss-context-parallel-count", "mtp-loss-context-parallel-normalisation"
OF_PACKS = ("packed-rotary-host-reads", "mtp-packed-roll-boundaries")
# release -> what mends its gradients under context parallelism
VERSIONS = dict.fromkeys(("0.14.0", "0.15.3", "0.16.1"), COUNT)
VERSIONS |= dict.fromkeys(("0.17.1", "0.18.2", "0.19.2"), RATIO)
OVERRIDE = """
import typing
import typing_extensions
typing.override = typing_extensions.override  # all that the scripts have of Python 3.12, which 0.18 asks for
"""
_SAID = """
    --transformer-impl local --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 64
    --max-position-embeddings 64 --position-embedding-type rope --micro-batch-size 1
    --mtp-num-layers 1 --mtp-loss-scaling-factor 1.0 --attention-dropout 0 --hidden-dropout 0 --lr 1e-3
    --train-iters 1 --eval-iters 0 --eval-interval 100 --split 100,0,0 --num-workers 0
    --no-gradient-accumulation-fusion --no-persist-layer-norm
    --no-masked-softmax-fusion --no-rope-fusion --log-interval 1 --tensorboard-log-interval 1
"""
ARGUMENTS = _SAID.split()
_SAID = "--mock-data --tokenizer-type NullTokenizer --vocab-size 1023 --global-batch-size 1"
MOCKED = _SAID.split()
_SAID = """
    --sft --tokenizer-type SFTTokenizer --sft-tokenizer-prompt-format nemotron-nano-v2
    --calculate-per-token-loss --no-create-attention-mask-in-dataloader
"""
CONVERSED = _SAID.split()
WORDS = 61  # of the tokenizer of those
_REFUSED = "its script says: Multi-Token Prediction (MTP) is not supported with Context Parallelism."
_NO_PACKS = "its script has no packs: no batch of it has boundaries of sequences (cu_seqlens)"
_A_ROW = (
    "its script cannot train on packs: get_batch leaves their boundaries in a row, where rotary "
    "embeddings fail (Boolean value of Tensor with more than one value is ambiguous)"
)


def barred(reason: str, *versions: str) -> list[Any]:
    """Releases in which a test cannot run, and why."""
    return [pytest.param(version, marks=pytest.mark.skip(f"{version}: {reason}")) for version in versions]


@pytest.fixture
def checkout(version: str, release: Release, tmp_path: Path) -> Path:
    """The tag of a release, with the index builder that is compiled in its wheel."""
    pytest.importorskip("six")  # which 0.16 and earlier import and nobody declares
    upstream = repository(UPSTREAM)
    refs = (f"core_v{version}", f"core_r{version.rpartition('.')[0]}.0")  # not every release has a tag
    ref = next(filter(upstream.head, refs), None)
    if ref is None:
        pytest.skip(f"the clone of Megatron-LM has neither {' nor '.join(refs)}")
    top = upstream.ask("ls-tree", "--name-only", ref).split()
    folders = [name for name in top if name.endswith(".py") or name == "megatron"]
    root = unpacked(upstream, ref, tmp_path / "tree", *folders, "examples/run_simple_mcore_train_loop.py")
    (tmp_path / "sitecustomize.py").write_text(OVERRIDE)
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
    arguments = (*ARGUMENTS, *MOCKED, "--context-parallel-size", str(size), "--tensorboard-dir", str(board))
    printed = ran(checkout / "pretrain_gpt.py", size, before, arguments, checkout.parent)
    return _logged(board)["grad-norm"], printed


def _logged(board: Path) -> dict[str, float]:
    """What a script logged of its first step, by name."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulators.EventAccumulator(str(board))
    events.Reload()
    return {name: events.Scalars(name)[0].value for name in events.Tags()["scalars"]}


@pytest.mark.parametrize("version", [*barred(_REFUSED, "0.12.3", "0.13.1"), *VERSIONS])
def test_gradients_of_megatrons_own_training_script_are_those_of_one_rank(version: str, checkout: Path):
    alone, _ = norm(checkout, 1)
    without, _ = norm(checkout, 2)
    enabled, printed = norm(checkout, 2, VERSIONS[version])
    assert without == pytest.approx(alone, rel=0.05) and abs(without / alone - 1) > 3e-4
    assert enabled == pytest.approx(alone, rel=1e-5)
    assert f"APPLY {VERSIONS[version]}" in printed[0] and "APPLY" not in printed[1]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """One of transformers, made here: a few words, between blanks."""
    tokenizers, transformers = map(pytest.importorskip, ("tokenizers", "transformers"))
    words = ["<unk>", "<eos>", *(f"w{n}" for n in range(WORDS))]
    vocabulary = {word: token for token, word in enumerate(words)}
    whole = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    whole.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=whole, unk_token="<unk>", eos_token="<eos>")
    made.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def conversation(first: int, asked: int) -> list[dict[str, str]]:
    """A system's, a user's and an assistant's words; the user's are so many.

    The assistant's are as many in all, as the script logs the mean of the means of its rows.
    """
    counts = {"system": 2, "user": asked, "assistant": 6}
    return [
        {"role": role, "content": " ".join(f"w{(first + count + 7 * n) % WORDS}" for n in range(count))}
        for role, count in counts.items()
    ]


NO_PACKS = barred(_NO_PACKS, "0.12.3", "0.13.1", "0.14.0", "0.15.3")


@pytest.mark.parametrize("version", [*NO_PACKS, *barred(_A_ROW, "0.16.1"), "0.17.1", "0.18.2", "0.19.2"])
def test_packed_conversations_train_megatrons_own_script_as_unpacked_ones_do(
    version: str, checkout: Path, tokenizer: Path, tmp_path: Path
):
    pytest.importorskip("datasets", reason="Megatron-LM reads conversations by datasets, which is not here")
    if pytest.importorskip("transformers").__version__ >= "5":
        pytest.skip(
            "transformers 5: the script wants tokens of its apply_chat_template, and gets a dictionary"
        )
    each = [conversation(1, 9), conversation(20, 3), conversation(40, 12)]
    vouched = [word for patch in OF_PACKS for word in ("--vouch", patch)]
    before = ["--backend", "cpu", "--features", "packed,mtp"]

    def first_step(name: str, rows: list[list[dict[str, str]]], *vouched: str) -> dict[str, float]:
        data, board = (tmp_path / f"{name}.jsonl", tmp_path / name)
        data.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
        said = [
            "--data-path",
            str(data),
            "--tokenizer-model",
            str(tokenizer),
            "--tensorboard-dir",
            str(board),
        ]
        said += ["--global-batch-size", str(len(rows))]
        (printed,) = ran(
            checkout / "pretrain_gpt.py",
            1,
            [*before, *vouched],
            [*ARGUMENTS, *CONVERSED, *said],
            checkout.parent,
        )
        assert all((f"APPLY {patch}" in printed) is bool(vouched) for patch in OF_PACKS)
        logged = _logged(board)
        return {key: logged[key] for key in ("lm loss", "mtp_1 loss", "grad-norm")}

    alone = first_step("unpacked", each)
    joined = [message for messages in each for message in messages]
    assert first_step("packed", [joined]) == pytest.approx(alone, rel=1e-6)
    assert first_step("patched", [joined], *vouched) == pytest.approx(alone, rel=1e-6)
    one = [joined[0], *(message for message in joined if message["role"] != "system")]  # and no boundary
    assert first_step("one", [one])["grad-norm"] != pytest.approx(alone["grad-norm"], rel=1e-3)


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
    before = ["--backend", "cpu", "--features", "mtp"]
    (without,), (enabled,) = (
        ran(PREDICTING, 1, [*before, *said], (str(tmp_path / f"store-{len(said)}"), "apart"), tree)
        for said in ((), vouching)
    )
    norms = [[float(n) for n in text.rpartition("norms ")[2].split()] for text in (without, enabled)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6) and norms[0][0] > 1e-3, norms
    weighted = "mtp-per-token-weight"
    assert f"APPLY {weighted}" in enabled and f"UNVOUCHED {weighted}" in without
