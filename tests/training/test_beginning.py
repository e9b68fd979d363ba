"""What training begins with: the weights of model.path, random ones, or a checkpoint; what it exports."""

import json
import random
import re
import shutil
import string
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.command import finish, start_training
from tests.families import reference
from tests.families.cases import CASES, Case
from tests.training.verdicts import find_resumed_steps

CASE = next(case for case in CASES if case.name == "qwen2 yarn with a factor")
_TEXT = "a" * 50_000  # every sample is the same: what is drawn first changes no loss
_LENGTH = 32


def train(directory: Path, model: Path, *overrides: str, code: int = 0, flags: Sequence[str] = ()) -> str:
    text = directory.with_suffix(".txt")
    text.write_text(_TEXT)
    values = (
        f"model.path={model}", "model.dtype=fp32", f"data.path=[{text}]", "data.tokenizer=bytes",
        "model.config.vocab_size=258", "optimizer={lr: 1e-3, min_lr: 1e-3, warmup_steps: 0}",
        "checkpoint.interval=1", "train.log_interval=1", *overrides,
    )  # fmt: skip
    recipe = directory.with_suffix(".yaml")
    recipe.write_text(
        "name: beginning\nbackend: cpu\nmodel: {path: none}\n"
        f"data: {{source: text, path: [none], tokenizer: bytes, sequence_length: {_LENGTH}}}\n"
        "train: {steps: 1, global_batch_size: 2, micro_batch_size: 2}\n"
    )
    return finish(start_training(recipe, directory, values, *flags), code, timeout=900)


def write_model(directory: Path, case: Case = CASE) -> None:
    """Write the model of a case, with a vocabulary for bytes."""
    reference.write(replace(case, config=case.config | {"vocab_size": 258}), directory)


def noted(directory: Path, name: str) -> list[float]:
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


def loss(transformers, model: Path) -> float:
    """Transformers' own, of any sample."""
    import torch

    torch.set_num_threads(1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    row = torch.full((1, _LENGTH + 1), ord("a"))
    with torch.no_grad():
        return float(theirs(row, labels=row).loss)


@pytest.mark.slow
@pytest.mark.world
def test_a_run_begins_with_the_weights_of_its_path_and_exports_what_it_trained(tmp_path):
    pytest.importorskip("megatron.core")
    transformers = pytest.importorskip("transformers")
    model, held = tmp_path / "model", tmp_path / "held.txt"
    write_model(model)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    held.write_text(_TEXT)
    evaluated = f"data.validation_sets={{held: {{path: [{held}]}}}}"
    export, every = "checkpoint.export=hf", "checkpoint.export_interval=1"
    said = train(tmp_path / "loaded", model, "train.steps=2", evaluated, export, every)
    exported = tmp_path / "loaded" / "hf"
    assert f"starts from {model}: " in said and "random" not in said
    assert f"exported to {exported}" in said
    wanted, trained = loss(transformers, model), loss(transformers, exported)
    assert noted(tmp_path / "loaded", "train/loss")[0] == pytest.approx(wanted, rel=1e-5)
    assert noted(tmp_path / "loaded", "validation/held/loss")[-1] == pytest.approx(trained, rel=1e-5)
    assert trained != pytest.approx(wanted, rel=1e-2)
    first, second = (tmp_path / "loaded" / f"hf-{step:08d}" for step in (1, 2))
    after_one = loss(transformers, first)
    assert noted(tmp_path / "loaded", "train/loss")[1] == pytest.approx(after_one, rel=1e-5)
    assert after_one != pytest.approx(trained, rel=1e-3) and not second.exists(), "that is the last one's"
    planned = json.loads((tmp_path / "loaded" / "job.json").read_text())["plan"]["export"]["bytes"]
    written = sum(path.stat().st_size for path in exported.glob("*.safetensors"))
    assert planned < written < planned + 2**14, "what is more is headers"
    assert (exported / "chat_template.jinja").read_text() == "{{ messages }}"
    train(tmp_path / "again", exported)
    assert noted(tmp_path / "again", "train/loss")[0] == pytest.approx(trained, rel=1e-5)

    said = train(tmp_path / "random", model, "model.weights=random")
    assert "random" in said and "model.weights" in said
    assert noted(tmp_path / "random", "train/loss")[0] != pytest.approx(wanted, rel=1e-2)
    said = train(tmp_path / "random", model, "model.weights=random", export)
    assert find_resumed_steps(said) == [1] and "exported to" in said
    again = train(tmp_path / "random", model, "model.weights=random", export, code=2)
    assert "train.steps" in again

    for file in model.glob("*.safetensors*"):
        file.unlink()
    said = train(tmp_path / "loaded", model, "train.steps=3", evaluated, export, every, flags=["--resume"])
    assert loss(transformers, second) == pytest.approx(trained, rel=1e-6), "what was the last one's"
    assert find_resumed_steps(said) == [2] and "begins with" not in said
    assert loss(transformers, exported) != pytest.approx(trained, rel=1e-4)
    said = train(tmp_path / "none", model)
    assert "random" in said and str(model) in said
    assert "model.weights" in train(tmp_path / "asked", model, "model.weights=load", code=2)


@pytest.mark.world
@pytest.mark.slow
def test_weights_that_are_gathered_by_the_next_pass_are_exported_after_the_last_step(tmp_path):
    """Each of two ranks has updated half of them; there is no evaluation that would gather the rest."""
    pytest.importorskip("megatron.core")
    safetensors = pytest.importorskip("safetensors.torch")
    model = tmp_path / "model"
    write_model(model)
    values = ("devices.per_node=2", "train.micro_batch_size=1", "data.validation=0", "checkpoint.export=hf")
    late = "distributed={overlap_grad_reduce: true, overlap_param_gather: true}"
    train(tmp_path / "at once", model, *values)
    train(tmp_path / "late", model, *values, late)
    at_once, late_ones = (tmp_path / name / "hf" / "model.safetensors" for name in ("at once", "late"))

    def stale() -> list[str]:
        wanted, found = safetensors.load_file(at_once), safetensors.load_file(late_ones)
        assert wanted.keys() == found.keys()
        return [name for name in wanted if not wanted[name].equal(found[name])]

    assert not stale()
    shutil.rmtree(late_ones.parent)
    train(tmp_path / "late", model, *values)  # exports what the checkpoint holds
    assert not stale()


@pytest.mark.world
@pytest.mark.slow
def test_weights_of_a_run_begin_another_task_on_other_data_in_another_layout(tmp_path):
    pytest.importorskip("megatron.core")
    model, before = tmp_path / "model", tmp_path / "before"
    write_model(model)
    train(before, model, "train.steps=2", "checkpoint.export=hf")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "b", "response": "cd"}\n' * 9)
    task = (
        "task=sft", "data.source=jsonl", f"data.path=[{rows}]", "data.validation=0", "train.steps=2",
        "optimizer={name: sgd, lr: 0.5, min_lr: 0.1}",
    )  # fmt: skip
    halves = ("parallel.tp=2", "devices.per_node=2")
    begins = ["--from", str(before)]
    said = train(tmp_path / "refused", model, *task[:-2], "train.steps=3", *halves, code=2, flags=begins)
    assert f"--from {before}/checkpoints/step-00000002 --weights-only" in said
    assert "other data" in said

    after = tmp_path / "after"
    said = train(after, model, *task, *halves, flags=[*begins, "--weights-only"])
    assert f"{before}/checkpoints/step-00000002" in said
    assert not find_resumed_steps(said) and "random" not in said
    told = json.loads((after / "job.json").read_text())["start"]
    assert (told["origin"], told["weights_only"]) == (str(before), True)
    train(tmp_path / "published", before / "hf", *task)
    wanted = noted(tmp_path / "published", "train/loss")
    assert noted(after, "train/loss") == pytest.approx(wanted, rel=1e-5)
    assert noted(after, "train/learning_rate") == [0.5, 0.1]
    assert noted(after, "train/samples") == [2, 4]
    more = train(after, model, *task, *halves, "train.steps=3", flags=[*begins, "--weights-only", "--resume"])
    assert find_resumed_steps(more) == [2]


@pytest.mark.world
@pytest.mark.slow
def test_adapters_do_not_go_on_beside_other_weights(tmp_path):
    """These are the same to the last byte, or the file is named."""
    pytest.importorskip("megatron.core")
    safetensors = pytest.importorskip("safetensors.torch")
    model, run = tmp_path / "model", tmp_path / "run"
    write_model(model)
    lora = ("model.lora={rank: 2, alpha: 4, targets: [o_proj]}", "train.steps=2")
    two = ("devices.per_node=2", "train.micro_batch_size=1")
    train(run, model, *lora, *two)
    file = max(model.glob("model-*.safetensors"))
    before = file.read_bytes()
    values = safetensors.load_file(file)
    values[min(values)].view(-1)[-1] += 1
    safetensors.save_file(values, file, {"format": "pt"})
    longer = (*lora[:1], "train.steps=3")
    said = train(run, model, *longer, *two, code=2, flags=["--resume"])
    assert "step-00000002" in said and "model.path" in said
    assert set(re.findall(r"model-\S+\.safetensors", said)) == {file.name}
    file.write_bytes(before)
    said = train(run, model, *longer, *two[1:], flags=["--resume"])  # on one rank
    assert find_resumed_steps(said) == [2]


@pytest.mark.world
@pytest.mark.parametrize("scaling", ["tensorwise", "blockwise"])
@pytest.mark.slow
def test_fp8_adapters_resume_with_the_same_losses(tmp_path, scaling):
    pytest.importorskip("megatron.core")
    model, whole, halves = (tmp_path / name for name in ("model", "whole", "halves"))
    write_model(model)
    text = tmp_path / "text.txt"
    text.write_text("".join(random.Random(1).choices(string.ascii_lowercase, k=20_000)))
    adapters = "model.lora={rank: 2, alpha: 4, targets: all-linear}"
    settings = (f"data.path=[{text}]", "model.dtype=bf16", adapters, f"model.fp8={{scaling: {scaling}}}")
    train(whole, model, *settings, "train.steps=4")
    train(halves, model, *settings, "train.steps=2")
    said = train(halves, model, *settings, "train.steps=4", flags=["--resume"])
    assert find_resumed_steps(said) == [2]
    undisturbed = noted(whole, "train/loss")
    assert len(set(undisturbed)) == 4 and noted(halves, "train/loss") == undisturbed


@pytest.mark.world
@pytest.mark.parametrize("name", ["qwen3_next as published", "qwen3_5_moe_text as published"])
@pytest.mark.slow
def test_gated_delta_nets_go_on_where_they_were_in_another_layout_too_and_are_exported(tmp_path, name):
    pytest.importorskip("megatron.core.ssm.gated_delta_net")
    transformers = pytest.importorskip("transformers")
    model, whole, halves, stages = (tmp_path / of for of in ("model", "whole", "halves", "stages"))
    case = next(case for case in CASES if case.name == name)
    write_model(model, case)
    text, held = tmp_path / "text.txt", tmp_path / "held.txt"
    text.write_text("".join(random.Random(1).choices(string.ascii_lowercase, k=20_000)))  # no samples alike
    held.write_text(_TEXT)
    data = (f"data.path=[{text}]", f"data.validation_sets={{held: {{path: [{held}]}}}}")
    tensors, pipeline = ("parallel={tp: 2, sequence_parallel: true}", "parallel={pp: 2}")
    longer, export = "train.steps=4", "checkpoint.export=hf"

    train(whole, model, *data, tensors, longer)
    train(halves, model, *data, tensors, "train.steps=2")
    shutil.copytree(halves, stages)
    undisturbed = noted(whole, "train/loss")
    assert len(set(undisturbed)) == 4
    train(halves, model, *data, tensors, longer, flags=["--resume"])
    assert noted(halves, "train/loss") == undisturbed
    said = train(stages, model, *data, pipeline, longer, export, flags=["--resume"])
    assert find_resumed_steps(said) == [2]
    assert noted(stages, "train/loss") == pytest.approx(undisturbed, rel=1e-5)
    trained = loss(transformers, stages / "hf")
    assert noted(stages, "validation/held/loss")[-1] == pytest.approx(trained, rel=1e-5)
    assert trained != pytest.approx(loss(transformers, model), rel=1e-2)
