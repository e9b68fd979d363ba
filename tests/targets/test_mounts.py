"""Inputs of a job that are here, and that the container of a job would not see, are said by name."""

import json
from pathlib import Path

import pytest

from bundle.launch.job import from_plan
from bundle.planning import build_plan
from bundle.planning.inputs import find_existing_local_inputs
from bundle.recipe import load
from bundle.targets.mounts import Mount, find_unmounted_inputs
from tests.command import run_bundle
from tests.runs.test_origin import kept_by

pytestmark = pytest.mark.processes

MODEL = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512, "rms_norm_eps": 1e-5}
MODEL |= {"max_position_embeddings": 512, "tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"]}
TARGETS = {
    "slurm": ("--image=/images/x.sqsh", "--dry-run"),
    "docker": ("--dry-run",),
    "kubernetes": (),
}
PLACES = ("model", "tokenizer", "text", "held", "before")


@pytest.fixture
def words(tmp_path) -> list[str]:
    """A recipe whose inputs lie beside the working directory, and not in it."""
    for name in PLACES:
        (tmp_path / name).mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(MODEL))
    vocabulary = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
    (tmp_path / "tokenizer/tokenizer.json").write_text(json.dumps(vocabulary))
    for file in ("text/one.txt", "held/two.txt", "work/three.txt"):
        (tmp_path / file).write_text("a" * 2000)
    kept_by(tmp_path / "before", load("demo"), 7)
    at = f"{tmp_path}/"
    overrides = (
        f"data.tokenizer=hf:{at}tokenizer",
        f"data.path=[{at}text/*.txt, three.txt, {at}nowhere]",
        f"data.validation_sets={{apart: {{path: [{at}held]}}}}",
        f"model={{path: {at}model}}",
        "parallel.ep=1",
    )
    return [f"--set={each}" for each in overrides] + [f"--from={at}before", "--weights-only"]


def launch(folder: Path, target: str, *words: str) -> list[str]:
    """What `launch` says is not shown to the container."""
    words = ("launch", target, "demo", "--hardware=cpu", *words, *TARGETS[target])
    done = run_bundle(*words, cwd=folder / "work", code=0)
    return [line for line in done.stderr.splitlines() if "the container does not see this path" in line]


@pytest.mark.parametrize("target", TARGETS)
def test_every_input_that_is_here_and_in_no_mount_is_named_and_with_mounts_none_is(target, words, tmp_path):
    said = launch(tmp_path, target, *words)
    named = (
        f"model.path {tmp_path}/model: ",
        f"data.tokenizer {tmp_path}/tokenizer: ",
        f"data.path {tmp_path}/text/*.txt: ",
        f"data.validation_sets.apart.path {tmp_path}/held: ",
        f"--from {tmp_path}/before: ",
    )
    assert len(said) == len(named), said
    for part in named:
        assert any(part in line for line in said), part
    source = "CLAIM" if target == "kubernetes" else f"{tmp_path}/text"
    assert any(f"--mount {source}:{tmp_path}/text" in line for line in said), said

    def mounts(*names: str) -> list[str]:
        claim = "claim:" if target == "kubernetes" else ""
        return [f"--mount={claim}{tmp_path}/{name}" for name in names]

    assert launch(tmp_path, target, *words, *mounts(*PLACES)) == []
    (left,) = launch(tmp_path, target, *words, *mounts(*PLACES[:-1]))
    assert "--from" in left


def test_without_a_container_nothing_is_said(words, tmp_path, monkeypatch):
    monkeypatch.setitem(TARGETS, "slurm", ("--dry-run",))
    assert launch(tmp_path, "slurm", *words) == []


def test_what_is_mounted_elsewhere_or_only_linked_to_is_not_seen(tmp_path):
    for name in ("data", "real"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").touch()
    (tmp_path / "data/link").symlink_to(tmp_path / "real")
    adapter = "model.lora={rank: 2, alpha: 4, targets: [o_proj]}"

    def said(path: str, *mounts: str) -> list[str]:
        recipe = load("demo", [f"data.path=[{path}]", "model.mtp.layers=0", adapter])
        job = from_plan(
            build_plan(recipe, backend="cpu", hardware_name="cpu", mcore="0.16.1"), tmp_path / "run"
        )
        return list(
            find_unmounted_inputs(
                job, [Mount.from_option(each, tmp_path) for each in mounts], tmp_path, "say {}"
            )
        )

    data, real = f"{tmp_path}/data", f"{tmp_path}/real"
    assert said(f"{data}/x.txt", data) == said(f"{data}/x.txt", f"{data}:{data}:ro") == []
    for mounts in ((), (f"{data}:/elsewhere",), (f"{data}xx",), (f"{data}/x.txt.old",)):
        (text,) = said(f"{data}/x.txt", *mounts)
        assert f"say {data}" in text
    assert len(said(f"{data}/link", data)) == 1
    assert said(f"{data}/link", data, real) == said(f"{tmp_path}/data/../real", real) == []


def test_adapters_are_an_input_megatrons_files_are_known_by_their_prefix_and_stdlib_is_of_the_image(tmp_path):
    (tmp_path / "adapter").mkdir()
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["o_proj"], "bias": "none"}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(said))
    for ending in ("idx", "bin"):
        (tmp_path / f"tokens.{ending}").touch()
    adapted = [f"model.lora={{path: {tmp_path}/adapter}}", "model.mtp.layers=0"]
    (of_adapter,) = find_existing_local_inputs(load("demo", adapted))  # its data is stdlib
    assert of_adapter == ("model.lora.path", f"{tmp_path}/adapter", (tmp_path / "adapter",))
    (data,) = find_existing_local_inputs(
        load("demo", ["data.source=megatron", f"data.path=[{tmp_path}/tokens, {tmp_path}/gone]"])
    )
    assert data == ("data.path", f"{tmp_path}/tokens", (tmp_path / "tokens.idx",))
