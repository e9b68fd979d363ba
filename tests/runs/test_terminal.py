"""What a run shows on a terminal."""

import io
import os
import sys

import pytest
from rich.console import Console

from bundle.runs.metrics import LiveProgress, PlainLines, terminal

TRAINED = {
    "train/loss": 2.7449,
    "train/mtp_1_loss": 2.7301,
    "train/grad_norm": 1.3512,
    "train/learning_rate": 0.000415,
    "train/tokens_per_second": 3058.02,
    "train/step_seconds": 0.6697,
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
    for number in ("loss 2.5 ", "mtp_1_loss 2.73", "grad_norm 1.351", "tokens_per_second 3058"):
        assert number in last


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
        sink = terminal(300, 0, stream)
        assert isinstance(sink, PlainLines)
        sink.write(7, {"train/loss": 2.5})
        sink.close()
        assert lines.readline() == "step   7/300  train/loss 2.5\n"
