"""`mcore-bundle tune` as a user meets it: what it prints and writes, and short real runs."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest

from bundle.errors import JobFailed
from bundle.recipe import load
from tests.command import SMALL, call_bundle, capture_bundle, sets

H200 = ("--hardware", "h200", "--mcore", "0.16.1")
TINY = ("backend=cpu", "model.dtype=fp32", "devices.per_node=1", *SMALL)


def tune(*words: str | Path) -> tuple[int, str]:
    return capture_bundle("tune", *map(str, words))


def test_the_best_layouts_are_printed_with_reasons_and_written(tmp_path, messages):
    file = tmp_path / "best.yaml"
    code, text = tune("qwen3-tp2-sp", *H200, "--devices-per-node", "2", "--write", file)
    assert code == 0
    messages(text)
    written = load(file)
    assert written.devices.per_node == 2
    assert call_bundle("plan", file, *H200) == 0
    (words,) = [line for line in text.splitlines() if line.startswith("set ")]
    assert f"train.micro_batch_size={written.train.micro_batch_size}" in words
    assert file.read_text().startswith("# Written by `mcore-bundle tune`: ")


def test_json_has_the_numbers_and_the_keys_to_set(tmp_path):
    nodes = ("--nodes", "2", "--set", "train.global_batch_size=64")
    code, text = tune("demo", *H200, *nodes, "--json")
    document = json.loads(text)
    best = document["candidates"][document["best"]]
    assert code == 0 and len(document["candidates"]) == 10 <= document["planned"] <= document["allowed"]
    fastest = max(of["tokens_per_second"] for of in document["candidates"])
    assert best["tokens_per_second"] == pytest.approx(fastest, rel=0.01)
    assert best["tokens_per_second"] == pytest.approx(64 * 128 / sum(best["seconds"].values()))
    assert best["measured_tokens_per_second"] is None
    changed = load("demo", [*nodes[3:], *document["set"]])
    assert changed.parallel.dump() == best["parallel"]
    assert (changed.devices.nodes, changed.devices.per_node) == (2, 8)
    assert call_bundle("plan", "demo", *H200, *sets(*nodes[3:], *document["set"])) == 0


def test_a_file_is_replaced_only_with_force(tmp_path, messages):
    file = tmp_path / "best.yaml"
    file.write_text("precious")
    code, text = tune("demo", *H200, "--write", file)
    assert code == 2 and file.read_text() == "precious"
    messages(text)
    assert tune("demo", *H200, "--write", file, "--force")[0] == 0
    assert load(file).name == "demo"


def test_no_fitting_layout_ends_with_3(tmp_path, messages):
    code, text = tune("sft-deepseek-v3-h200", *H200, "--nodes", "1", "--write", tmp_path / "best.yaml")
    assert code == 3
    assert "too much" in text and list(tmp_path.iterdir()) == []
    messages(text)


def test_a_recipe_for_more_devices_of_a_node_ends_with_3_at_once(messages):
    code, text = tune("sft-qwen3-8b-a3", *H200)
    assert code == 3 and "devices.per_node" in text
    messages(text)
    assert tune("sft-qwen3-8b-a3", *H200, "--devices-per-node", "8")[0] == 0


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((*H200, "--measure", "1"), id="hardware"),
        pytest.param(("--nodes", "2", "--measure", "1"), id="nodes"),
    ],
)
def test_other_machines_are_not_measured(words, messages):
    code, text = tune("demo", *words)
    assert code == 2 and "--measure" in text
    messages(text)


def test_a_step_of_rl_is_not_measured(messages):
    code, text = tune("grpo-arithmetic-cpu", "--measure", "1")
    assert code == 2
    messages(text)


def test_the_measurement_decides(capfd):
    speeds = [JobFailed("exit code 1: no memory"), 20.0, 30.0]
    with patch("bundle.runs.measuring.measure_speed", side_effect=speeds) as runs:
        assert call_bundle("tune", "demo", "--measure", "3", "--json") == 0
    printed = capfd.readouterr()
    document = json.loads(printed.out)
    assert runs.call_count == 3 and document["best"] == 2
    assert [of["measured_tokens_per_second"] for of in document["candidates"][:4]] == [None, 20, 30, None]
    assert "no memory" in printed.err


def test_a_measurement_without_a_run_ends_with_1(capfd, messages):
    with patch("bundle.runs.measuring.measure_speed", side_effect=JobFailed("exit code 1: no memory")):
        assert call_bundle("tune", "demo", "--measure", "2") == 1
    printed = capfd.readouterr()
    assert not printed.out
    messages(printed.err)


@pytest.mark.slow
@pytest.mark.world
def test_real_runs_are_measured_beside_the_prediction(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert call_bundle("tune", "qwen3-tp2-sp", *sets(*TINY), "--measure", "1", "--write", "best.yaml") == 0
    printed = capfd.readouterr().out
    (line,) = [line for line in printed.splitlines() if line.startswith("*1 ")]
    measured = float(line.split(" measured")[0].split()[-1].replace(",", ""))
    assert measured > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.yaml"], "the runs are gone"
    assert load("best.yaml").train.steps == 2, "the recipe keeps its length"
