"""The options that verbs have in common are one list, and reach a verb as the values that they are."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bundle.cli import dpo, launch, options, plan, pretrain, sft, train
from bundle.cli.request import JobRequest, Machines, expand_options

COMMON = {field.name for field in fields(JobRequest)}
LAUNCH: Any = typer.main.get_command(launch.app)
TARGETS = sorted(set(LAUNCH.commands) - {"status", "logs", "stop", "wait"})


def parameters(command) -> dict[str, list[str]]:
    return {each.name: each.opts for each in command.params}


@pytest.mark.parametrize(
    "command",
    [
        *(typer.main.get_command(verb.app) for verb in (train, sft, dpo, pretrain)),
        typer.main.get_command(plan.app),
        *(LAUNCH.commands[name] for name in TARGETS),
    ],
)
def test_every_verb_that_plans_a_job_knows_what_a_job_is_asked_for_with(command):
    known = parameters(command)
    assert set(known) >= COMMON
    assert known["overrides"] == ["--set"] and known["start_from"] == ["--from"]


def test_what_is_said_reaches_the_verb_and_what_is_not_is_as_it_would_be():
    app, called = typer.Typer(), []

    @app.command()
    @expand_options
    def verb(recipe: options.Recipe, request: JobRequest, machines: Machines, more: int = 3) -> None:
        called.append((recipe, request, machines, more))

    words = ["demo", "--set", "a=1", "--set=b=2", "--from=x", "--weights-only", "--nodes=2", "--more=4"]
    assert CliRunner().invoke(app, words).exit_code == 0
    asked = JobRequest(overrides=["a=1", "b=2"], start_from=Path("x"), weights_only=True)
    assert called == [("demo", asked, Machines(nodes=2), 4)]
    assert CliRunner().invoke(app, ["demo"]).exit_code == 0
    assert called[1] == ("demo", JobRequest(), Machines(), 3)
