"""The page, as a browser shows it: opened in a real one where there is one."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from bundle.errors import EnvironmentUnfit
from bundle.report import (
    CHART_METRIC_PREFIXES,
    LINKED_PLOTTING_LIBRARY_FILE,
    group_metrics_by_chart,
    read_run,
    render_page,
    write_page,
)
from tests.command import run_bundle
from tests.report.runs import write

FETCH = re.compile(r"<(script|link|img|iframe)[^>]*(src|href)=\"(?!plotly\.min\.js\")")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
PLAN: dict[str, Any] = {
    "layout": {"world": 16, "axes": {"tp": {"size": 4}, "cp": {"size": 1}, "dp": {"size": 4}}},
    "hardware": {"backend": "cuda", "devices": [{"name": "NVIDIA H200"}, {"name": "NVIDIA H200"}]},
    "megatron": {"version": "0.17.1"},
    "attention": {"value": "fused"},
    "stages": [{"bytes": {"total": 3 << 30}}, {"bytes": {"total": 5 << 30}}],
    "recipe": {"train": {"steps": 8}, "optimizer": {"lr": 0.25}},
    "patches": [
        {"id": "mtp-zero-layers", "action": "APPLY", "reason": "the defect is here"},
        {"id": "mla-packed-qkv", "action": "SKIP", "reason": "fixed here"},
    ],
    "environment": [{"name": "NCCL_CUMEM_ENABLE", "value": "0", "why": "weight sync"}],
    "notes": ["a note"],
}


class Text(HTMLParser):
    """The text of a page without scripts, and the elements that were opened."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.rows: list[list[str]] = []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_data(self, data):
        if self.tags[-1:] not in (["script"], ["style"]) and data.strip():
            self.words.append(data.strip())
            if self.tags[-1] in ("td", "th"):
                self.rows[-1].append(data.strip())


def shown(*runs):
    text = Text()
    text.feed(render_page([read_run(run) for run in runs]))
    return text


def reports(**numbers):
    return [{"step": step, **{name: value / step for name, value in numbers.items()}} for step in (1, 2, 4)]


def test_a_run_is_summed_up(tmp_path):
    versions = {
        "torch": {"version": "2.11.0", "commit": None},
        "megatron-core": {"version": "0.17.1", "commit": "abc"},
    }
    files = {"plan": PLAN, "result": {"loss": 1.5}, "versions": versions}
    page = shown(write(tmp_path / "big", reports(**{"train/loss": 3.0}), **files))
    for row in (
        ["Steps", "4 of 8"],
        ["Loss at the end", "1.5"],
        ["Layout", "tp4 dp4"],
        ["Ranks", "16"],
        ["Hardware", "NVIDIA H200"],
        ["Attention", "fused"],
        ["Planned memory of a device", "5.0 GiB"],
        ["Patches applied", "1"],
        ["torch", "2.11.0"],
        ["megatron-core", "0.17.1 (abc)"],
        ["mla-packed-qkv", "SKIP", "fixed here"],
        ["NCCL_CUMEM_ENABLE=0", "weight sync"],
    ):
        assert row in page.rows, row
    (applied,) = (row for row in page.rows if row[0] == "mtp-zero-layers")
    assert len(applied) == 3 and applied[2] == PLAN["patches"][0]["reason"] and len(applied[1]) > 20
    assert "a note" in page.words and not any(row[:1] == ["key"] for row in page.rows)


def test_two_runs_stand_side_by_side_with_what_differs(tmp_path):
    other = {**PLAN, "recipe": {"train": {"steps": 8}, "optimizer": {"lr": 0.5}}}
    one = write(tmp_path / "a" / "run", reports(**{"train/loss": 3.0}), plan=PLAN)
    two = write(tmp_path / "b" / "run", reports(**{"train/loss": 2.0}), plan=other)
    page = shown(one, two)
    assert ["key", "run (1)", "run (2)"] in page.rows and ["optimizer.lr", "0.25", "0.5"] in page.rows
    assert ["train.steps", "8", "8"] not in page.rows
    assert ["Steps", "4 of 8, not finished", "4 of 8, not finished"] in page.rows


def test_a_run_with_nothing_but_numbers_has_a_page(tmp_path):
    page = shown(write(tmp_path / "run", reports(**{"train/loss": 1.0})))
    assert [row for row in page.rows if row[0] == "Steps"] == [["Steps", "4, not finished"]]


def test_every_number_is_on_one_chart():
    names = {"train/loss", "validation/loss", "train/mtp_2_loss", "train/grad_norm", "memory/peak", "mine/x"}
    groups = group_metrics_by_chart(names)
    assert sorted(name for found in groups.values() for name in found) == sorted(names)
    assert groups["mine/x"] == ["mine/x"] and ["train/loss", "validation/loss"] in groups.values()
    assert list(groups)[:-1] == [title for title in CHART_METRIC_PREFIXES if title in groups]


def test_times_left_and_samples_are_not_on_the_axis_of_the_loss():
    names = ["train/loss", "train/seconds_left", "train/samples"]
    groups = group_metrics_by_chart(names)
    assert list(groups.values()) == [["train/loss"]]


def test_memory_is_in_gib_and_values_are_rounded(tmp_path):
    numbers = {"memory/peak_bytes": 3.0 * 2**30, "train/loss": 1 / 3}
    page = render_page([read_run(write(tmp_path / "run", reports(**numbers)))])
    curves = {
        trace["name"]: trace["y"]
        for text in re.findall(r"Plotly\.newPlot\(\s*\"[^\"]+\",\s*(\[.*?\]),\s*\{\"", page, re.DOTALL)
        for trace in json.loads(text)
    }
    assert curves["memory/peak_bytes"] == [3.0, 1.5, 0.75]
    assert curves["train/loss"] == [0.333333, 0.166667, 0.0833333]


def test_a_page_of_many_numbers_and_steps_is_below_a_megabyte(tmp_path):
    random = np.random.default_rng(0)
    lines = [
        {"step": step}
        | {f"train/{name}": value for name, value in enumerate(random.normal(size=40).tolist())}
        for step in range(1, 3001)
    ]
    page = render_page([read_run(write(tmp_path / "run", lines, plan=PLAN))])
    assert 10**5 < len(page.encode()) < 10**6


EVIL = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def evil(tmp_path):
    plan = {**PLAN, "notes": [EVIL], "megatron": {"version": EVIL}, "recipe": {EVIL: EVIL}}
    return write(tmp_path / "run", reports(**{EVIL: 1.0}), plan=plan, versions={EVIL: {"version": EVIL}})


def test_nothing_is_fetched(tmp_path):
    page = render_page([read_run(write(tmp_path / "run", reports(**{"train/loss": 1.0}), plan=PLAN))])
    assert not FETCH.search(page)


def test_text_of_a_run_is_text(tmp_path):
    tags = shown(evil(tmp_path)).tags
    assert "img" not in tags and tags.count("script") == shown(evil(tmp_path / "again")).tags.count("script")
    plain = shown(write(tmp_path / "plain", reports(**{"train/loss": 1.0}), plan=PLAN)).tags
    assert tags.count("script") == plain.count("script")


@pytest.mark.skipif(BROWSER is None, reason="no browser here")
def test_a_browser_draws_every_curve_and_runs_nothing_else(tmp_path):
    numbers = {"train/loss": 3.0, "validation/loss": 3.5, "train/grad_norm": 9.0, EVIL: 1.0}
    run = write(tmp_path / "run", reports(**numbers), plan={**PLAN, "notes": [EVIL]})
    page = tmp_path / "page.html"
    write_page(page, [read_run(run)])
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom")
    drawn = subprocess.run(
        [str(BROWSER), *flags, page.as_uri()], capture_output=True, text=True, timeout=120
    ).stdout
    assert drawn.count('class="trace scatter') == len(numbers)
    assert "<title>run</title>" in drawn
    assert re.search(r'class="xtitle"[^>]*>step<', drawn)


def test_without_the_libraries_the_message_says_what_to_install(tmp_path, monkeypatch, messages):
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(EnvironmentUnfit, match=r"\[report\]") as error:
        render_page([read_run(write(tmp_path / "run", reports(**{"train/loss": 1.0})))])
    messages(error.value)


def test_the_verb_writes_the_page_into_the_run(tmp_path, messages):
    run = write(tmp_path / "run", reports(**{"train/loss": 1.0}), plan=json.loads(json.dumps(PLAN)))
    done = run_bundle("report", run, code=0)
    assert done.stdout == f"{run / 'report.html'}\n"
    assert "Plotly.newPlot" in (run / "report.html").read_text(encoding="utf-8")
    assert (run / LINKED_PLOTTING_LIBRARY_FILE).stat().st_size > 10**6
    page = tmp_path / "page.html"
    done = run_bundle("report", run, "-o", page, code=0)
    assert done.stdout == f"{page}\n" and page.is_file()
    none = run_bundle("report", run, tmp_path, code=2)
    assert str(tmp_path) in none.stderr
    messages(none.stderr)
