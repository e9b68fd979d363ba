"""What `train` writes of a run: its directory at both ends, and events of JSON with --json."""

import json
from pathlib import Path
from typing import Any

import pytest

from bundle.launch import events
from tests.command import SMALL, run_bundle, sets

RECIPE = ("qwen3-tp2-sp", *sets(*SMALL), "--backend=cpu", "--devices-per-node=1", "--run-directory=run")
RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
RANK |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}


def train(cwd: Path, *words: str, code: int = 0, **environ: str) -> tuple[str, str]:
    """Return standard output and standard error of `train`, which must end with `code`."""
    ended = run_bundle("train", *RECIPE, *words, cwd=cwd, code=code, environment=environ)
    return ended.stdout, ended.stderr


def read_events(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.world
def test_a_run_writes_events_alone_on_standard_output(tmp_path):
    keys = sets("train.eval_interval=1", "data.validation=0.1", "checkpoint.interval=1")
    ended = run_bundle("train", *RECIPE, *keys, "--json", cwd=tmp_path, code=0, umask=0)
    out, err = ended.stdout, ended.stderr
    first, *between, last = read_events(out)
    run = tmp_path / "run"
    assert (first["event"], first["run_directory"]) == ("start", str(run))
    assert [(event["event"], event["step"]) for event in between] == [
        (kind, step) for step in (1, 2) for kind in ("step", "evaluation", "checkpoint")
    ]
    assert (last["event"], last["run_directory"], last["code"]) == ("end", str(run), 0)
    reported = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    same = [
        {k: v for k, v in e.items() if k not in ("event", "time")} for e in between if "directory" not in e
    ]
    assert same == [{k: v for k, v in line.items() if k != "time"} for line in reported]
    assert all(Path(event["directory"]).is_dir() for event in between if event["event"] == "checkpoint")
    assert "finished" in err
    for path in (run, *run.rglob("*")):
        assert path.stat().st_mode & 0o777 in ((0o750, 0o700) if path.is_dir() else (0o640, 0o600)), path


def block_logs(run: Path) -> None:
    """Have a launch in this run directory fail before it starts a rank."""
    run.mkdir()
    (run / "logs").touch()


def test_a_launch_that_fails_has_its_code_in_the_last_event(tmp_path):
    block_logs(tmp_path / "run")
    first, last = read_events(train(tmp_path, "--json", code=3)[0])
    assert (first["event"], last["event"], last["code"]) == ("start", "end", 3)


def test_the_run_directory_is_the_first_line_and_the_last(tmp_path):
    block_logs(tmp_path / "run")
    assert train(tmp_path, code=3)[0] == 2 * "run directory: run\n"


def test_a_rank_that_somebody_else_started_is_refused(tmp_path):
    out, err = train(tmp_path, "--json", code=2, **RANK)
    assert out == "" and "--json" in err


def test_only_lines_of_events_reach_standard_output(capsys):
    events.print_event("step", step=3)
    line = capsys.readouterr().out.rstrip("\n")
    for each in (line, "warning: slow", '{"foreign": 1}'):
        events.print_event_or_log_line(each, "[1/8] ")
    assert capsys.readouterr() == (f"{line}\n", '[1/8] warning: slow\n[1/8] {"foreign": 1}\n')
