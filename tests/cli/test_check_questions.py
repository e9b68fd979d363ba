"""`check` of task rl: questions, those to evaluate with, and what is left out."""

import json

from tests.command import capture_bundle

VERL = {"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}}


def check(*overrides: str) -> tuple[int, str]:
    return capture_bundle("check", "grpo-arithmetic-cpu", *(f"--set={one}" for one in overrides))


def test_the_questions_of_a_recipe_are_counted_and_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text = capture_bundle("check", "grpo-arithmetic-cpu", "--json", "--samples", "2")
    document = json.loads(text)
    assert code == 0
    assert document["questions"] == {"rows": 320, "longest": 6, "skipped": 0, "deleted": 0}
    assert document["evaluation"]["rows"] == 80
    assert len(document["samples"]) == 2 and all(sample.endswith("=") for sample in document["samples"])


def test_rows_without_an_answer_of_their_own_are_questions_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "rows.jsonl"
    rows = [VERL, {**VERL, "prompt": "x" * 90}, {"prompt": "?"}]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    overrides = [f"data.path=[{path}]", "data.fields={prompt: prompt}", "rl.warm_start_steps=0"]
    overrides += ["rl.rewards=[{kind: exact}]", "rl.evaluation=null"]
    code, text = check(*overrides)
    assert code == 2 and "rows.jsonl:2" in text and "rows.jsonl:3" in text
    code, text = check(*overrides, "data.on_error=skip", "data.truncation=delete")
    assert code == 0 and "rows.jsonl:3" in text and "\n1+1?" in text
    (line,) = [line for line in text.splitlines() if line.startswith("questions ")]
    assert line.split()[1] == "1"
