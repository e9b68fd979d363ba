"""What a run shows on a terminal."""

import io
import json
import os
import sys

import pytest
from rich.console import Console

from bundle.launch import events
from bundle.runs.metrics import JsonEventSink, LiveProgress, PlainLines, build_terminal_sink

TRAINED = {
    "train/loss": 2.7449,
    "train/mtp_1_loss": 2.7301,
    "train/grad_norm": 1.3512,
    "train/learning_rate": 0.000415,
    "train/tokens_per_second": 3058.02,
    "train/step_seconds": 0.6697,
    "train/seconds_left": 75.4,
    "train/mfu": 0.4123,
    "memory/peak_bytes": 3 << 29,
}


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_bar_and_every_number_can_be_read(width):
    screen = io.StringIO()
    live = LiveProgress(30, 0, Console(file=screen, force_terminal=True, width=width, color_system=None))
    live.write(10, TRAINED)
    live.write(10, {"validation/loss": 3.4911})
    live.write(20, TRAINED | {"train/loss": 2.5})
    live.close()
    shown = screen.getvalue()
    assert "…" not in shown
    assert "step 10  validation/loss 3.491" in shown
    last = shown[shown.rindex("step 20/30") :].replace("\n", " ")
    assert "━━━━" in last
    numbers = ("loss 2.5 ", "mtp_1_loss 2.73", "tokens/s 3,058", "memory 1.5 GiB", "left 0:01:15")
    for number in numbers:
        assert number in last
    assert last.count("left") == 1 and last.count(":") == 2
    assert not any(word in last for word in ("grad_norm", "learning_rate", "seconds", "mfu"))


def test_warnings_do_not_land_on_the_terminal(capsys):
    screen = io.StringIO()
    live = LiveProgress(3, 0, Console(file=screen, force_terminal=True, width=80))
    print("torch is deprecated", file=sys.stderr)
    live.close()
    assert "deprecated" not in screen.getvalue()
    assert "deprecated" in capsys.readouterr().err


def test_a_pipe_gets_one_line_per_report():
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream, os.fdopen(reading) as lines:
        sink = build_terminal_sink(300, 0, stream)
        assert isinstance(sink, PlainLines)
        sink.write(7, {"train/loss": 2.5})
        sink.close()
        assert lines.readline() == "step   7/300  train/loss 2.5\n"


def test_a_launcher_that_waits_for_events_gets_them(capsys, monkeypatch):
    monkeypatch.setenv(events.LISTENER_FLAG_VARIABLE, "1")
    sink = build_terminal_sink(3, 0)
    assert isinstance(sink, JsonEventSink)
    sink.write(0, {"data/skipped": 2})
    sink.write(1, {"train/loss": float("nan"), "train/samples": 4})
    sink.write(1, {"validation/chats/loss": 2.5})
    data, step, evaluation = map(json.loads, capsys.readouterr().out.splitlines())
    assert (data["event"], step["event"], evaluation["event"]) == ("data", "step", "evaluation")
    assert (data["data/skipped"], step["train/loss"], evaluation["validation/chats/loss"]) == (2, None, 2.5)
    assert step["train/samples"] == 4 and step["step"] == 1
