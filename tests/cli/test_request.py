"""The options that verbs have in common are one list, and reach a verb as the values that they are."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bundle.cli import dpo, launch, options, plan, pretrain, sft, train
from bundle.cli.request import JobRequest, Machines, expand_options, plan_job
from bundle.environment import image, packages
from bundle.environment.image import BuildInfo
from bundle.errors import UsageError
from bundle.launch import Start
from bundle.planning import to_recipe_problem
from bundle.recipe import load
from bundle.runs.directory import RunDirectory

COMMON = {field.name for field in fields(JobRequest)}
LAUNCH: Any = typer.main.get_command(launch.app)
TARGETS = sorted(set(LAUNCH.commands) - {"status", "logs", "stop", "wait", "list"})


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


RECORD = BuildInfo(
    schema=1, stack="cpu", revision="r1", inputs="i1", python="3.11.7", sources={},
    packages={"megatron-core": "0.17.1", "torch": "2.13.0"},
)  # fmt: skip


def test_a_job_is_what_its_request_says(tmp_path):
    request = JobRequest(run_directory=tmp_path, allow_drift=["mtp-zero-layers"], devices_per_node=4)
    machines = Machines(nodes=2, hardware="h200")
    recipe = load("demo", ["train.global_batch_size=64"])
    planned = plan_job(recipe, request, machines, RECORD, fresh=True, weights="theirs")
    job = planned.to_job()
    assert (job.backend, job.nodes, job.per_node, job.megatron) == ("cuda", 2, 4, "0.17.1")
    assert (job.directory, job.start, job.image) == (tmp_path, Start(fresh=True), RECORD)
    assert job.allow_drift == ("mtp-zero-layers",) and planned.plan.weights == "theirs"
    with pytest.raises(UsageError, match="ascend"):
        plan_job(recipe, JobRequest(backend="ascend"), machines)
    with pytest.raises(UsageError, match="gone"):
        plan_job(recipe, request, machines, RECORD, problems=[to_recipe_problem("gone")]).to_job()


def test_a_job_of_this_machine_has_the_record_of_its_image(tmp_path, monkeypatch):
    monkeypatch.setattr(image, "read_own_record", lambda: RECORD)
    recipe, request = load("demo"), JobRequest(run_directory=tmp_path)
    assert plan_job(recipe, request).to_job().image == RECORD
    assert plan_job(recipe, request, record=None).to_job().image is None


def test_a_megatron_that_is_imported_is_not_asked_for_again():
    core = packages.detect().megatron.core
    if core is None or core.version is None:
        pytest.skip("megatron-core is not installed")
    assert train.apply_and_clear_mcore(JobRequest(mcore=core.version, resume=True)) == JobRequest(resume=True)


def test_the_start_of_a_run_is_inspected_with_its_directory_and_inputs(tmp_path):
    (tmp_path / "notes.txt").touch()
    recipe = load("demo", ["data.path=gone"])
    _, problems = RunDirectory(tmp_path).describe_weights_and_problems(recipe, Start())
    texts = "\n".join(problem.text for problem in problems)
    assert "data.path 'gone'" in texts and "notes.txt" in texts
