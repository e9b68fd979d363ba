"""Whether the checkpoints and exports of a run fit on the disk where it lives."""

import shutil
from collections import namedtuple

import pytest

from bundle.errors import UsageError
from bundle.planning import build_plan
from bundle.planning.size import compute_model_size, estimate_checkpoint_export_disk
from bundle.recipe import load
from tests.planning.jobs import read_section

Usage = namedtuple("Usage", "total used free")


def test_checkpoints_that_stay_and_one_more_must_fit_where_the_run_will_be(tmp_path, monkeypatch):
    recipe, asked = load("demo", ["checkpoint.keep=4"]), []
    one = compute_model_size(recipe.architecture).count_checkpoint_bytes(recipe.model.dtype, recipe.optimizer)

    def usage(path):
        asked.append(path)
        return Usage(0, 0, free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    for free, fits in ((5 * one, True), (5 * one - 1, False)):
        found = estimate_checkpoint_export_disk(recipe, tmp_path / "not" / "yet" / "there")
        assert (found.checkpoint, found.checkpoints, found.free) == (one, 5 * one, free)
        assert found.is_sufficient == fits
    assert asked == [tmp_path, tmp_path]


def test_exports_take_room_too_each_that_of_its_weights(tmp_path):
    words = "checkpoint={export: %s, export_interval: %d}"
    for kind, every, steps, count in (
        ("hf", 0, 40, 1),
        ("hf", 10, 40, 4),
        ("hf", 10, 41, 5),
        ("hf", 50, 40, 1),
    ):
        recipe = load("demo", [words % (kind, every), f"train.steps={steps}", "model.dtype=bf16"])
        size = compute_model_size(recipe.architecture)
        found = estimate_checkpoint_export_disk(recipe, tmp_path)
        assert found.exports == count * 2 * (size.parameters + size.mtp_parameters)
        full = found._replace(free=found.checkpoints + found.exports)
        assert full.is_sufficient and not full._replace(free=full.free - 1).is_sufficient
    lora = "model.lora={rank: 2, alpha: 4, targets: [o_proj]}"
    recipe = load(
        "demo", [words % ("peft", 10), "train.steps=40", "model.mtp.layers=0", lora, "model.dtype=fp32"]
    )
    assert (
        estimate_checkpoint_export_disk(recipe, tmp_path).exports
        == 4 * 4 * compute_model_size(recipe.architecture, recipe.model).adapter_parameters
    )
    assert estimate_checkpoint_export_disk(load("demo"), tmp_path).exports == 0


EVERY = "checkpoint={export: hf-fp8, export_interval: 100}"


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        (["checkpoint.export=hf"], ["hf"]),
        ([EVERY, "train.steps=250"], ["hf-fp8", "100 steps", "3"]),
        ([EVERY, "train.steps=null", "train.epochs=2"], ["hf-fp8", "100 steps"]),
    ],
)
def test_a_plan_says_what_is_exported_and_when(overrides, values, messages):
    shown = read_section(build_plan(load("demo", overrides), hardware_name="cpu"), "export")
    assert [value for value in values if value not in shown] == []
    messages(shown)


def test_a_plan_without_exports_says_nothing_of_them():
    assert read_section(build_plan(load("demo"), hardware_name="cpu"), "export") == ""


def test_an_interval_of_exports_needs_an_export(messages):
    with pytest.raises(UsageError, match="export_interval") as error:
        load("demo", ["checkpoint.export_interval=5"])
    messages(error.value)
