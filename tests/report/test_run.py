"""What is read of a run directory, whatever lies there."""

import json
import random

import pytest

from bundle.errors import UsageError
from bundle.report import MAX_POINTS, Curve, read_run, render_page
from tests.report.runs import write

HUGE = f'{{"step": 2, "a": {10**400}}}'


def test_the_last_report_of_a_step_counts_and_steps_are_in_order(tmp_path):
    reports: list[dict[str, object]] = [
        {"step": 4, "time": 1.5, "train/loss": 3.0},
        {"step": 8, "train/loss": 2.0, "validation/loss": 2.5},
        {"step": 4, "train/loss": 2.75},
        {"step": 2, "train/loss": 5},
    ]
    curves = read_run(write(tmp_path / "run", reports)).curves
    assert curves["train/loss"] == Curve((2, 4, 8), (5.0, 2.75, 2.0))
    assert curves["validation/loss"] == Curve((8,), (2.5,)) and set(curves) == {
        "train/loss",
        "validation/loss",
    }


def test_what_is_no_number_is_no_point_of_a_curve(tmp_path):
    reports: list[dict[str, object]] = [
        {"step": 1, "a": None, "b": True, "c": "7", "d": [1], "train/loss": 1},
        {"step": 2, "a": 3},
    ]
    assert {
        name: curve.steps for name, curve in read_run(write(tmp_path / "run", reports)).curves.items()
    } == {
        "a": (2,),
        "train/loss": (1,),
    }


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 2, "a": 1' + "0" * 400 + "}",
        "{",
        "[1]",
        '{"train/loss": 1}',
        '{"step": "1"}',
        '{"step": true}',
        "[" * 99_999,
    ],
)
def test_a_line_that_is_no_report_is_told(tmp_path, line):
    run = write(tmp_path / "run", [{"step": 1, "train/loss": 1}])
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f"{line}\n\n")
    (reason,) = read_run(run).unread
    assert reason.startswith("metrics.jsonl: ") and reason.endswith(": 1")


@pytest.mark.parametrize("text", ["{", "[]", "3", "\0"])
def test_a_file_that_is_no_object_is_told_and_left_out(tmp_path, text):
    run = write(tmp_path / "run", [{"step": 1, "train/loss": 1}])
    (run / "job.json").write_text(text)
    found = read_run(run)
    (reason,) = found.unread
    assert reason.startswith("job.json: ") and found.plan == {}
    assert found.find_plan_value("layout", "axes") is None


@pytest.mark.parametrize(
    "plan",
    [
        {"stages": [1]},
        {"stages": [{"bytes": 3}]},
        {"hardware": {"devices": [3]}},
        {"layout": {"axes": ["tp"]}},
        {"patches": [{"id": "a"}]},
        {"recipe": [3]},
    ],
)
def test_a_plan_of_another_form_is_told_and_left_out(tmp_path, plan):
    run = write(tmp_path / "run", [{"step": 1, "train/loss": 1}], plan=plan, result={"ended": "last step"})
    found = read_run(run)
    (reason,) = found.unread
    assert reason.startswith("job.json: ") and found.plan == {}
    assert "last step" in render_page([found])


@pytest.mark.parametrize("job", ["{", '{"recipe": null, "plan": {"stages": [1]}}'], ids=["half", "form"])
def test_what_is_left_out_is_told_by_its_file(tmp_path, job, messages):
    run = write(tmp_path / "run", [{"step": 1, "train/loss": 1}, {"train/loss": 1}])
    (run / "job.json").write_text(job)
    told = read_run(run).unread
    assert {reason.partition(": ")[0] for reason in told} == {"metrics.jsonl", "job.json"}
    messages("\n".join(told))


def test_a_value_of_the_plan_is_found_by_its_keys(tmp_path):
    run = read_run(write(tmp_path / "run", [{"step": 1, "a": 1}], plan={"layout": {"world": 8}, "notes": []}))
    assert (
        run.find_plan_value("layout", "world"),
        run.find_plan_value("notes", "world"),
        run.find_plan_value("other"),
    ) == (
        8,
        None,
        None,
    )


def test_where_no_run_is_the_message_says_what_to_give(tmp_path, messages):
    for directory in (tmp_path, write(tmp_path / "run", [])):
        with pytest.raises(UsageError, match=f"{directory}/metrics.jsonl: ") as error:
            read_run(directory)
        messages(error.value)


@pytest.mark.parametrize("count", [MAX_POINTS, MAX_POINTS + 1, 3 * MAX_POINTS + 7, 1_000_003])
def test_a_long_curve_keeps_its_extremes(count):
    drawn = random.Random(count)
    values = [drawn.random() for _ in range(count)]
    spike, dip = drawn.sample(range(count), 2)
    values[spike], values[dip] = 99.0, -99.0
    curve = Curve(tuple(range(0, 5 * count, 5)), tuple(values)).downsample_to_extremes()
    points = dict(zip(curve.steps, curve.values, strict=True))
    assert points[5 * spike] == 99.0 and points[5 * dip] == -99.0
    assert list(curve.steps) == sorted(points) and min(count, MAX_POINTS // 2) <= len(points) <= MAX_POINTS
    assert all(values[step // 5] == value for step, value in points.items())


def test_names_of_numbers_come_from_the_file_alone(tmp_path):
    run = write(tmp_path / "run", [{"step": 1, "</script>": 1}])
    assert json.loads((run / "metrics.jsonl").read_text()) == {"step": 1, "</script>": 1}
    assert set(read_run(run).curves) == {"</script>"}


def test_answers_of_the_first_and_the_last_step_are_shown(tmp_path):
    run = write(tmp_path / "run", [{"step": 1, "reward/mean": 1}])
    rollouts = run / "rollouts"
    rollouts.mkdir()
    for step in range(3):
        lines = [
            {"prompt": f"<b>{step}?", "text": f"{step}-{answer}", "reward": None if answer else 0.5}
            for answer in range(8)
        ]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (rollouts / f"step-{step:08d}.jsonl").write_text(text + ("{\n" * 8 if step == 2 else ""))
    found = read_run(run)
    assert {sample.step for sample in found.samples} == {"step-00000000", "step-00000002"}
    first = found.samples[0]
    assert (first.question, first.text, first.reward) == ("<b>0?", "0-0", "0.5")
    assert [sample.reward for sample in found.samples[:2]] == ["0.5", "none"]
    (reason,) = found.unread
    assert reason.startswith("rollouts/step-00000002.jsonl: ")
    page = render_page([found])
    assert "&lt;b&gt;0?" in page and "<b>0?" not in page
