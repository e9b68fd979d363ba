"""The trace of the steps that a recipe names: which steps, which ranks, and that it can be opened."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from bundle.recipe import load
from bundle.runs.metrics import Profiler


def trace(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def build_name(rank: int, first: int, last: int) -> str:
    return f"rank-{rank}-steps-{first}-{last}.json.gz"


def run(directory: Path, steps: str, *numbers: int, rank: int = 0, ranks: str = "[0]") -> list[str]:
    with Profiler(load("demo", [f"profile={{steps: {steps}, ranks: {ranks}}}"]), directory, rank) as profiler:
        for number in numbers:
            with profiler.step(number):
                torch.ones(3, number + 4).sum()
    return sorted(path.name for path in directory.glob("*"))


def test_the_steps_that_are_named_are_in_the_trace_and_no_others(tmp_path):
    (name,) = run(tmp_path, "[2, 3]", 1, 2, 3, 4)
    assert name == build_name(0, 2, 3)
    events = trace(tmp_path / name)
    assert {e["name"] for e in events if e["name"].startswith("step ")} == {"step 2", "step 3"}
    shapes = {str(e["args"]["Input Dims"][0]) for e in events if e["name"] == "aten::sum"}
    assert shapes == {"[3, 6]", "[3, 7]"}


def test_a_run_that_goes_on_or_ends_inside_traces_what_it_has(tmp_path):
    assert run(tmp_path / "on", "[2, 4]", 3, 4, 5) == [build_name(0, 3, 4)]
    assert run(tmp_path / "ends", "[2, 4]", 1, 2, 3) == [build_name(0, 2, 3)]
    assert run(tmp_path / "before", "[2, 4]", 1) == []


def test_ranks_that_are_not_named_write_nothing(tmp_path):
    assert run(tmp_path, "[1, 1]", 1, rank=1) == []
    assert run(tmp_path, "[1, 1]", 1, rank=3, ranks="[1, 3]") == [build_name(3, 1, 1)]


def test_a_recipe_without_a_profile_traces_nothing(tmp_path):
    profiler = Profiler(load("demo"), tmp_path, 0)
    with profiler, profiler.step(0), profiler.step(1):
        pass
    assert list(tmp_path.iterdir()) == []
