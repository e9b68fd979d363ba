"""A job is decided once: from the recipe to its file, and from the file to what every rank does."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bundle.environment import image
from bundle.environment.image import BuildInfo
from bundle.launch.job import FILE_NAME, UNDECIDED, load
from bundle.recipe import load as load_recipe
from tests.command import NO_GPU, SMALL, finish, run_bundle, run_without_torch, sets, start_bundle
from tests.launch.launched import reserved

RECIPE = ("qwen3-tp2-sp", *sets(*SMALL))


def ranks(commands: Sequence[Sequence[str]], cwd: Path, code: int) -> list[str]:
    """What each of several ranks says that nobody of ours started: torchrun's variables and no launcher."""
    size, started = len(commands), []
    with reserved() as port:
        for rank, words in enumerate(commands):
            told = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
            where = {name: str(value) for name, value in told.items()}
            where |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", **NO_GPU}
            started.append(start_bundle(*words, cwd=cwd, environment=where))
        return [finish(process, code) for process in started]


def test_a_job_file_says_all_about_the_job(tmp_path, messages):
    run_bundle("plan", *RECIPE, "--backend=cpu", "--job=j.json", cwd=tmp_path, code=0)
    said = run_bundle("train", "--job=j.json", "--fresh", "--set=seed=1", cwd=tmp_path, code=2).stderr
    messages(said)
    assert "fresh" in said and "overrides" in said
    nothing = run_bundle("train", cwd=tmp_path, code=2).stderr
    messages(nothing)
    assert "--job" in nothing
    assert run_bundle("train", "demo", "--job=j.json", cwd=tmp_path, code=2).stderr == nothing
    two = ("--nodes=2", "--node-rank=0", "--rendezvous=h:1", "--dry-run")
    said = run_bundle("train", "--job=j.json", *two, cwd=tmp_path, code=2).stderr
    messages(said)
    assert "the job is for 1" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["j.json"]


def test_a_plan_that_cannot_run_writes_no_job(tmp_path):
    said = run_bundle("plan", "demo", "--set", "data.path=gone", "--job=j.json", cwd=tmp_path, code=2).stdout
    assert "data.path 'gone'" in said and list(tmp_path.iterdir()) == []


@pytest.mark.world
def test_planned_where_there_is_no_torch_and_executed_here(tmp_path):
    pytest.importorskip("megatron.core")
    import megatron.core

    version = megatron.core.__version__
    asked = ("--hardware=cpu", f"--mcore={version}", "--run-directory=kept", "--job=j.json")
    assert "train --job=j.json" in run_without_torch("plan", *RECIPE, *asked, cwd=tmp_path).stdout
    told = replace(load(tmp_path / "j.json"), image=UNDECIDED)
    (tmp_path / "j.json").write_text(told.to_text())
    assert told.patches is None and told.recipe.train.steps == 2
    said = run_bundle("train", "--job=j.json", cwd=tmp_path, code=0).stdout
    assert "step 2/2" in said and "finished: loss" in said
    kept = tmp_path / "kept"
    assert json.loads((kept / "result.json").read_text())["step"] == 2
    # The launch got the file as it was; what its first rank decided is in the run directory.
    assert (kept / "logs/node-0/1" / FILE_NAME).read_text() == (tmp_path / "j.json").read_text()
    done = load(kept / FILE_NAME)
    assert done.patches is not None and done.patches.version == version
    assert done.recipe == told.recipe and done.image == image.read_own_record()
    assert load_recipe(kept / "recipe.yaml") == told.recipe
    assert "train.steps" in run_bundle("train", "--job=j.json", cwd=tmp_path, code=2).stderr


@pytest.mark.world
@pytest.mark.slow
def test_ranks_that_nobody_of_ours_started_do_what_the_first_decides(tmp_path):
    pytest.importorskip("megatron.core")
    first = ("train", *RECIPE, "--backend=cpu", "--set", "train.steps=1")
    other = ("train", *RECIPE, "--backend=cpu", "--set", "train.steps=9")
    said, _ = ranks([first, other], tmp_path, 0)
    assert "step 1/1" in said
    assert json.loads((tmp_path / "runs" / RECIPE[0] / "result.json").read_text())["step"] == 1


@pytest.mark.world
def test_what_the_first_rank_refuses_ends_all(tmp_path):
    pytest.importorskip("megatron.core")
    words = ("train", *RECIPE, "--backend=cpu", "--set", "train.global_batch_size=3")
    for said in ranks([words, words], tmp_path, 2):
        assert "global_batch_size: 3" in said


@pytest.mark.world
def test_ranks_with_different_files_name_what_differs(tmp_path):
    pytest.importorskip("megatron.core")
    for steps in (3, 4):
        asked = (*RECIPE, "--backend=cpu", "--devices-per-node=2", "--set", f"train.steps={steps}")
        run_bundle("plan", *asked, f"--job={steps}.json", cwd=tmp_path, code=0)
    commands = [("train", "--job=3.json"), ("train", "--job=4.json")]
    digests = [load(tmp_path / f"{steps}.json").agreement_digest for steps in (3, 4)]
    for said in ranks(commands, tmp_path, 3):
        assert "recipe (rank 0: " in said
        assert f"job (rank 0: {digests[0]}; rank 1: {digests[1]})" in said
        assert "patch " not in said and "image" not in said
    assert not (tmp_path / "runs" / RECIPE[0] / "checkpoints").exists()


RECORD = BuildInfo(
    schema=1, stack="cpu", revision="r1", inputs="i1", python="3.11.7", sources={},
    packages={"megatron-core": "0.16.1", "torch": "2.13.0"},
)  # fmt: skip


def test_a_job_for_an_image_is_refused_outside_of_it(tmp_path):
    pytest.importorskip("megatron.core")
    (tmp_path / "record.json").write_text(RECORD.to_json())
    asked = ("--hardware=cpu", "--image-record=record.json", "--job=j.json")
    run_without_torch("plan", *RECIPE, *asked, cwd=tmp_path)
    told = load(tmp_path / "j.json")
    assert (told.image, told.megatron, told.patches) == (RECORD, "0.16.1", None)
    said = run_bundle("train", "--job=j.json", cwd=tmp_path, code=3).stderr
    assert "image: " in said and "image cpu" in said
    assert not (tmp_path / "runs").exists()
