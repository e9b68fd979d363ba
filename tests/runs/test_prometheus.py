"""What Prometheus is given, as OpenMetrics says it, and what the dashboard of docs/ asks for."""

import json
import math
import re
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from bundle.errors import EnvironmentUnfit
from bundle.recipe.sections import PrometheusSection as PrometheusSection
from bundle.runs import prometheus
from bundle.runs.prometheus import (
    OPENMETRICS_CONTENT_TYPE,
    PrometheusSink,
    format_exposition,
    parse_metric_key,
)
from tests import command
from tests.training.test_interruption import TINY

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
_SAMPLE = re.compile(r'(?P<name>[a-zA-Z_:][\w:]*)\{(?P<labels>(?:\w+="(?:[^"\\]|\\.)*",?)+)\} (?P<value>\S+)')


def families(text: str) -> dict[str, dict[str, float]]:
    """name behind the prefix -> label `of` -> value, of a text that must be as the specification says."""
    *lines, end, nothing = text.split("\n")
    assert (end, nothing) == ("# EOF", "")
    found: dict[str, dict[str, float]] = {}
    current = ""
    for line in lines:
        if line.startswith("# TYPE "):
            name, kind = line.removeprefix("# TYPE ").split(" ")
            current = name.removeprefix(prometheus.PREFIX)
            assert kind == "gauge" and current not in {name, *found}
            found[current] = {}
            continue
        match = _SAMPLE.fullmatch(line)
        assert match and match["name"] == prometheus.PREFIX + current, line
        of = re.search(r'of="((?:[^"\\]|\\.)*)"', match["labels"])
        found[current][of[1] if of else ""] = float(match["value"])
    return found


def test_numbers_are_gauges_and_data_sets_are_labels():
    text = format_exposition(
        {"train/loss": 3.5, "validation/loss": 4.0, "validation/code/loss": 4.5, "data/skipped/code": 2},
        "demo",
    )
    assert families(text) == {
        "train_loss": {"": 3.5},
        "validation_loss": {"": 4.0, "code": 4.5},
        "data_skipped": {"code": 2.0},
    }
    assert '{run="demo",of="code"} 4.5' in text


def test_names_that_nobody_expected_are_written_as_they_may_be():
    text = format_exposition({'validation/a "b"\\c\nd/loss': 1.0, "train/mtp-1 loss": math.inf}, 'r"\\\n')
    assert set(families(text)) == {"validation_loss", "train_mtp_1_loss"}
    assert families(text)["train_mtp_1_loss"] == {"": math.inf}
    assert math.isnan(families(format_exposition({"train/loss": math.nan}, "r"))["train_loss"][""])
    assert families(format_exposition({"train/loss": -math.inf}, "r"))["train_loss"][""] == -math.inf


def asked(port: int, path: str = "/metrics") -> tuple[str, str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def test_whoever_asks_is_given_what_was_reported_last():
    sink = PrometheusSink(PrometheusSection(port=0), "demo", restarts=2)
    try:
        assert families(asked(sink.port)[1]) == {"restarts": {"": 2.0}}
        sink.write(10, {"train/loss": 3.5, "train/grad_norm": 1.0})
        sink.write(20, {"train/loss": 3.25})
        kind, text = asked(sink.port)
        assert kind == OPENMETRICS_CONTENT_TYPE
        assert families(text) == {
            "restarts": {"": 2.0},
            "step": {"": 20.0},
            "train_loss": {"": 3.25},
            "train_grad_norm": {"": 1.0},
        }
        with pytest.raises(urllib.error.HTTPError, match="404"):
            asked(sink.port, "/")
    finally:
        sink.close()
    with pytest.raises(urllib.error.URLError):
        asked(sink.port)


def test_it_listens_where_only_this_machine_can_ask_unless_told_otherwise_and_a_port_that_is_taken_is_named():
    assert PrometheusSection(port=1).address == "127.0.0.1"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentUnfit, match=rf"metrics\.prometheus: .*127\.0\.0\.1:{port}: "):
            PrometheusSink(PrometheusSection(port=port), "demo", restarts=0)


@pytest.mark.world
@pytest.mark.slow
def test_a_run_goes_on_where_another_program_has_the_port(tmp_path):
    pytest.importorskip("megatron.core")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        keys = (*TINY, f"metrics.prometheus={{port: {port}}}")
        output = command.finish(command.start_training("demo", tmp_path / "run", keys))
    assert (tmp_path / "run" / "result.json").exists()
    assert "metrics.prometheus" in output and str(port) in output


def test_each_metric_of_the_dashboard_is_one_that_a_run_reports():
    from bundle.runs.progress import Progress
    from tests.training.test_loop import Slow, recipe, run

    reported: set[str] = set()
    for line in run(Slow(recipe()), Progress()):
        reported |= set(line) - {"step"}
    own = {"train/straggler_ratio", "train/tflops_per_device", "memory/peak_bytes"}
    there = {parse_metric_key(key)[0] for key in reported | own | {prometheus.STEP, prometheus.RESTARTS}}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(expressions) >= 10
    for expression in expressions:
        used = re.findall(r"mcore_bundle_\w+", expression)
        assert used and set(used) <= there, expression


@pytest.mark.releases
def test_a_real_run_serves_all_that_it_reports_and_that_the_dashboard_asks_for(tmp_path):
    pytest.importorskip("megatron.core")
    more = (
        "train.steps=500",
        "train.log_interval=1",
        "train.eval_interval=1",
        "metrics.prometheus={port: 0}",
    )
    process = command.start_training("demo", tmp_path / "run", (*TINY, *more), stderr=subprocess.STDOUT)
    assert process.stdout is not None
    try:
        port, said = 0, []
        for line in process.stdout:
            said.append(line)
            if match := re.search(r"http://127.0.0.1:(\d+)/metrics", line):
                port = int(match[1])
            if "step   3/500" in line:
                break
        assert port, said
        there = {prometheus.PREFIX + name for name in families(asked(port)[1])}
    finally:
        process.kill()
        process.communicate()
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()[:4]
    assert {parse_metric_key(key)[0] for line in lines for key in json.loads(line)} - {
        "mcore_bundle_time"
    } <= there
    used = set(re.findall(r"mcore_bundle_\w+", DASHBOARD.read_text()))
    assert used <= there
