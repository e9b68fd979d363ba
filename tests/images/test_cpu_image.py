"""The CPU image does its work under the rules of a strict cluster, and ends as the documentation says."""

import json
from pathlib import Path

import pytest

from tests.command import run_without_torch
from tests.images import containers
from tests.vision import rows

pytestmark = pytest.mark.images

# Bytes, uncompressed: half of them are torch's CPU build; a CUDA build would be several times that.
CEILING = 1.9e9
SHORT = ("--set=train.steps=20", "--set=optimizer.warmup_steps=5", "--set=train.eval_batches=1",
         "--set=train.eval_interval=0", "--set=train.log_interval=1")  # fmt: skip


def test_the_size_stays_below_the_ceiling(engine, cpu):
    layers = engine.docker("history", "--human=false", "--format={{.Size}}\t{{.CreatedBy}}", cpu).splitlines()
    size = sum(int(layer.split("\t")[0]) for layer in layers)
    print(f"{cpu}: {size / 1e6:.0f} MB")
    assert size < CEILING, "\n".join(layers)


def test_it_says_what_it_is_and_who_runs_it(engine, cpu):
    (image,) = json.loads(engine.docker("image", "inspect", cpu))
    settings = image["Config"]
    assert settings["User"] == "10001:0"
    assert settings["Entrypoint"] == ["tini", "-g", "--", "mcore-bundle"]
    assert settings["StopSignal"] == "SIGTERM"
    assert settings["Labels"]["mcore-bundle.stack"] == "cpu"
    stamped = containers.run(
        engine, cpu, "-c", "cat /opt/bundle/build-info.json", options=("--entrypoint=sh",)
    )
    assert json.loads(stamped.out)["stack"] == "cpu"
    assert containers.run(engine, cpu).out.startswith("Usage: mcore-bundle")


def test_only_home_can_be_written_to(engine, cpu):
    tries = "touch /x 2>&1; touch /opt/venv/x 2>&1; touch $HOME/x && id -u && id -g"
    result = containers.run(engine, cpu, "-c", tries, options=("--entrypoint=sh",))
    assert result.out.count("Read-only") == 2
    assert result.out.endswith("10001\n0\n")


def test_nothing_of_the_machine_that_built_it_stays(engine, cpu, passed):
    files = "cat /etc/pip.conf /run/secrets/* /run/wheelhouse/*; find /root/.cache -type f"
    looks = f"({files}) 2>/dev/null | wc -c"
    assert containers.run(engine, cpu, "-c", looks, options=("--entrypoint=sh", "--user=0")).out == "0\n"
    history = engine.docker("history", "--no-trunc", cpu)
    for path in (*passed.secrets.values(), passed.wheelhouse):
        assert str(path) not in history


def test_doctor_is_green(engine, cpu):
    result = containers.run(engine, cpu, "doctor", "--json")
    assert result.code == 0, result.out
    assert {finding["level"] for finding in json.loads(result.out)["findings"]} == {"ok"}, result.out


def test_the_demo_trains_twenty_steps(engine, cpu):
    result = containers.run(engine, cpu, "train", "demo", *SHORT)
    assert result.code == 0, result.err
    lines = [line for line in result.out.splitlines() if "train/loss" in line]
    losses = [float(line.split("train/loss ")[1].split()[0]) for line in lines]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1


def test_a_run_without_a_temporary_directory_leaves_none_in_the_home(engine, cpu):
    with containers.volume(engine) as home:
        mount = f"--volume={home}:{containers.HOME}"
        strict = (mount, "--shm-size=64m")
        result = containers.run(engine, cpu, "train", "demo", *SHORT, "--set=train.steps=6", options=strict)
        assert result.code == 0, result.err
        names = containers.run(engine, cpu, "-c", "ls -A", options=(mount, "--entrypoint=sh")).out.split()
    assert set(names) <= {".cache", ".config", "runs"}


def test_a_model_that_sees_images_takes_its_first_steps(engine, cpu, tmp_path):
    names = [f"images/{number}.png" for number in range(8)]
    given = [rows.asking(f"<image>which is this? {n}", str(n), images=[name]) for n, name in enumerate(names)]
    files = {name: rows.content(rows.image(16, 16, seed)) for seed, name in enumerate(names)}
    rows.write(tmp_path / "shown", given, files)
    tmp_path.chmod(0o755)
    (tmp_path / "digits.yaml").write_text(rows.RECIPE.read_text())
    sets = [f"--set={one}" for one in rows.overrides(Path("/data/shown"), "train.global_batch_size=8")]
    quiet = ("--set=train.log_interval=1", "--set=train.eval_interval=0", "--set=optimizer.warmup_steps=0")
    short = ("--set=train.steps=5", "--set=train.micro_batch_size=8", *quiet)
    mount = f"--volume={tmp_path}:/data:ro"
    result = containers.run(engine, cpu, "train", "/data/digits.yaml", *sets, *short, options=(mount,))
    assert result.code == 0, result.err
    lines = [line for line in result.out.splitlines() if "train/loss" in line]
    losses = [float(line.split("train/loss ")[1].split()[0]) for line in lines]
    assert len(losses) == 5 and losses[-1] < losses[0]


def test_an_unknown_user_trains_too(engine, cpu):
    result = containers.run(
        engine, cpu, "train", "demo", *SHORT, "--set=train.steps=6", options=("--user=4242",)
    )
    assert result.code == 0, result.err


def test_sigterm_leaves_a_checkpoint_and_75_and_the_same_command_goes_on(engine, cpu):
    sizes = ("--set=train.steps=60", "--set=train.micro_batch_size=2", "--set=train.global_batch_size=4")
    command = ("train", "demo", *SHORT, *sizes)
    with containers.volume(engine) as home:
        options = ("--network=none", f"--volume={home}:{containers.HOME}")
        with containers.started(engine, cpu, *command, options=options) as trains:
            trains.wait_for("step  3/60")
            engine.docker("stop", "--time=60", trains.name, seconds=90)
            assert trains.wait() == 75, trains.logs()
        result = containers.run(engine, cpu, *command, options=options[1:])
    assert result.code == 0, result.err
    assert "after step" in result.out
    assert "step 60/60" in result.out


def test_a_job_planned_without_torch_is_executed_and_one_for_another_image_refused(engine, cpu, tmp_path):
    (tmp_path / "image.json").write_text(containers.run(engine, cpu, "doctor", "--json").out)
    asked = ("plan", "demo", "--hardware=cpu", "--image-record=image.json", *SHORT, "--set=train.steps=6")
    run_without_torch(*asked, "--job=job.json", cwd=tmp_path)
    job = json.loads((tmp_path / "job.json").read_text())
    assert job["patches"] == "undecided" and job["image"]["stack"] == "cpu"
    tmp_path.chmod(0o755)
    mount = f"--volume={tmp_path}:/jobs:ro"
    result = containers.run(engine, cpu, "train", "--job=/jobs/job.json", options=(mount,))
    assert result.code == 0, result.err
    assert "step 6/6" in result.out or "step  6/6" in result.out

    said = json.loads((tmp_path / "image.json").read_text())
    said["image"]["revision"] = "another"
    (tmp_path / "image.json").write_text(json.dumps(said))
    run_without_torch(*asked, "--job=other.json", cwd=tmp_path)
    refused = containers.run(engine, cpu, "train", "--job=/jobs/other.json", options=(mount,))
    assert refused.code == 3 and "revision" in refused.err and "another" in refused.err
