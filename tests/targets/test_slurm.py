"""The batch script, as Slurm and bash read it. What a scheduler does with it: test_slurm_runs.py."""

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bundle.errors import LaunchUnavailable, UsageError
from bundle.launch.job import Job, of_plan
from bundle.planning import plan_for
from bundle.recipe import load
from bundle.targets import ray, slurm
from bundle.targets.slurm import Options

GOLDEN = Path(__file__).parent / "golden"
# Whatever a path or a name may hold, but control characters, which are refused.
WORDS = st.text(
    st.characters(exclude_categories=("C", "Z"), exclude_characters=",%"), min_size=1, max_size=20
)


@pytest.fixture(scope="module")
def job() -> Job:
    recipe = load("demo", ["parallel.tp=2", "parallel.sequence_parallel=true", "train.global_batch_size=64"])
    made = plan_for(recipe, backend="cuda", named="h200", mcore="0.16.1", nodes=2, per_node=8)
    made.refuse()
    return of_plan(made, Path("/runs/demo"))


def in_bash(script: str, srun: str = "exit 0") -> list[str]:
    """The words that srun gets when bash runs a batch script."""
    recorder = (
        f"srun() {{ printf '%s\\0' \"$@\" >&3; ({srun}); }}\nscontrol() {{ printf '%s\\0' \"$@\" >&3; }}\n"
    )
    command = f"exec 3>&1 >/dev/null\n{recorder}{script}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, env={"SLURM_JOB_ID": "7"}, text=True, check=False
    )
    assert not done.stderr, done.stderr
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bare", Options(python="/venv/bin/python")),
        ("spares", Options(python="/venv/bin/python", spares=2)),
        ("ray", Options(python="/venv/bin/python", ray=True, restarts=2)),
        ("pyxis", Options(image="registry.example:5000/us/bundle:1", mounts=("/data", "/models:/m:ro"))),
        ("apptainer", Options(image="/images/bundle.sif", container="apptainer", sbatch=("time=4:00:00",))),
    ],
)
def test_the_scripts_are_the_golden_ones(job, name, options):
    found = slurm.script(job, options, Path("/work"))
    golden = GOLDEN / f"slurm-{name}.sh"
    # The name of the folder is a digest of the whole job, which changes with the package.
    assert found.replace(slurm.placed(job).name, "slurm-DIGEST") == golden.read_text()


@settings(max_examples=40)
@given(
    image=WORDS,
    mount=WORDS,
    workdir=WORDS,
    directory=WORDS,
    container=st.sampled_from(slurm.CONTAINERS),
    through=st.booleans(),
)
def test_hostile_names_reach_srun_as_they_are(job, image, mount, workdir, directory, container, through):
    job = replace(job, directory=Path("/runs") / directory)
    options = Options(image=f"/images/{image}", container=container, mounts=(f"/data/{mount}",), ray=through)
    words = in_bash(slurm.script(job, options, Path("/w") / workdir))
    assert f"--job={slurm.placed(job) / 'job.json'}" in words[-3:]
    assert any(word.endswith(f"/images/{image}") for word in words)
    both = f"/data/{mount}" if ":" in mount else f"/data/{mount}:/data/{mount}"
    assert any(both in word for word in words)
    assert any(str(Path("/w") / workdir) in word for word in words)


def test_a_job_that_was_told_to_save_is_queued_again_and_no_other(job, tmp_path):
    job = replace(job, directory=tmp_path / "it's $HOME")
    text = slurm.script(job, Options(), Path("/work"))
    assert in_bash(text, "exit 75")[-2:] == ["requeue", "7"]
    for code in (0, 1, 2, 6, 143):
        assert "requeue" not in in_bash(text, f"exit {code}")
    where = slurm.placed(job)
    where.mkdir(parents=True)
    (where / "stopped-7").touch()
    assert "requeue" not in in_bash(text, "exit 75")


def test_all_that_cannot_be_written_is_refused_at_once(job):
    options = Options(
        sbatch=("--time=1", "comment=a\nb", "x=1", "nodes=4"), mounts=("/a,b", "/c"), container="docker"
    )
    with pytest.raises(UsageError) as refused:
        slurm.script(replace(job, directory=Path("/runs/%j")), options, Path("/work"))
    text = str(refused.value)
    for part in (
        "'--time=1'",
        "'comment=a\\nb'",
        "holds a comma",
        "'docker'",
        "say --image",
        "reads % as its own",
        "'nodes=4': the job says",
    ):
        assert part in text, text
    assert "'x=1'" not in text


def test_through_ray_no_signal_reaches_it_and_the_step_is_waited_for_to_its_end(job, tmp_path):
    job = replace(job, directory=tmp_path / "it's $HOME")
    where = slurm.placed(job)
    where.mkdir(parents=True)
    (where / ray.STOP).touch()  # of a start before this one
    text = slurm.script(job, Options(ray=True), Path("/work"))
    assert "#SBATCH --signal=B:TERM@" in text
    # A step that tells its script to save, is told so by a file, and says that it has done so.
    stop = shlex.quote(str(where / ray.STOP))
    waits = f"for _ in $(seq 200); do [ -e {stop} ] && exit 75; sleep 0.05; done; exit 8"
    step = f"[ -e {stop} ] && exit 9; kill -TERM $$; {waits}"
    words = in_bash(text, step)
    assert words[-2:] == ["requeue", "7"]
    assert words[-5:-2] == [f"--job={where / 'job.json'}", "--restarts=0", "--start"]
    for code in (0, 6, 143):
        in_bash(text, f"exit {code}")
        assert (where / "ended-7").read_text() == f"{code}\n"
    options = Options(ray=True, spares=1)
    with pytest.raises(UsageError, match="--ray: leave out --preflight and --spares"):
        slurm.script(job, options, Path("/work"))


@pytest.mark.parametrize("through", [False, True])
def test_to_save_is_said_to_the_step_and_of_rays_to_its_script(tmp_path, monkeypatch, through):
    if through:
        (tmp_path / ray.TOKEN).touch()
    for name, does in (
        ("scontrol", f"echo 'JobId=7 JobState=RUNNING ExitCode=0:0 StdOut={tmp_path}/slurm-7.log'"),
        ("scancel", f'echo "$@" >{tmp_path}/asked'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    slurm.stop("7")
    assert (tmp_path / "asked").read_text() == f"{'--batch ' if through else ''}--signal=TERM 7\n"
    assert (tmp_path / "stopped-7").exists()


def test_an_own_option_wins_and_no_option_is_said_twice(job):
    text = slurm.script(job, Options(sbatch=("gpus-per-node=4", "exclusive=user")), Path("/w"))
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --nodes=2", "#SBATCH --gpus-per-node=4", "#SBATCH --exclusive=user"} <= set(lines)
    names = [shlex.split(line, comments=False)[1].partition("=")[0] for line in lines]
    assert len(names) == len(set(names))


def test_what_is_in_an_image_is_said_of_one_and_need_not_be(tmp_path):
    command = [sys.executable, "-m", "bundle", "launch", "slurm", "demo", "--dry-run"]

    def said(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True, check=False)

    done = said("--image-record=none")
    assert done.returncode == 2 and "say what it is of with --image" in done.stderr
    done = said("--image=x")
    assert done.returncode == 0 and "--container-image=x" in done.stdout
    assert "nobody said what is in the image: planned with megatron-core 0.16.1" in done.stderr
    for words in (("--image=x", "--image-record=none"), ()):
        assert said(*words).stderr == ""


def test_without_slurm_it_is_said_and_no_job_is_submitted(job, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchUnavailable, match="sbatch is not on the PATH"):
        slurm.submit(replace(job, directory=tmp_path / "run"), Options(), tmp_path)


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("JobState=RUNNING Reason=None ExitCode=0:0", None),
        ("JobState=PENDING Reason=BeginTime ExitCode=75:0", None),
        ("JobState=COMPLETED Reason=None ExitCode=0:0", 0),
        ("JobState=FAILED Reason=NonZeroExitCode ExitCode=4:0", 4),
        ("JobState=FAILED Reason=RaisedSignal:9(Killed) ExitCode=0:9", 137),
        ("JobState=CANCELLED Reason=None ExitCode=0:15", 143),
        ("JobState=TIMEOUT Reason=TimeLimit ExitCode=0:0", 143),
        ("JobState=NODE_FAIL Reason=NodeDown ExitCode=0:0", 5),
    ],
)
def test_a_job_ends_with_its_own_code(tmp_path, monkeypatch, said, code):
    tool = tmp_path / "scontrol"
    tool.write_text(f"#!/bin/sh\necho 'JobId=7 JobName=a b=c {said} StdOut=/runs/my run/x.log'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    state = slurm.state("7")
    assert (state.code, state.output) == (code, Path("/runs/my run/x.log"))
    assert state.name == said.split()[0].removeprefix("JobState=")


def scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
    """A client that gives one answer after the other; an empty one is that its controller is away."""
    folder.mkdir(exist_ok=True)
    for number, answer in enumerate(answers):
        (folder / str(number)).write_text(answer)
    client = folder / "scontrol"
    client.write_text(
        f"""#!/bin/sh
cd {shlex.quote(str(folder))}
n=$(cat asked 2>/dev/null || echo 0)
echo $((n + 1)) >asked
[ -s $n ] && cat $n || {{ echo 'Unable to contact slurm controller' >&2; exit 1; }}
"""
    )
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


def test_a_controller_that_is_away_for_a_while_loses_nothing_of_what_a_job_writes(
    tmp_path, monkeypatch, caplog
):
    log = tmp_path / "x.log"
    log.write_text("0: all of it\n")
    running, ended = (
        f"JobId=7 JobState={state} ExitCode=4:0 StdOut={log}" for state in ("RUNNING", "FAILED")
    )
    scontrol(tmp_path / "bin", monkeypatch, running, "", "", running, ended)
    assert list(slurm.follow("7", 0.01)) == ["0: all of it\n"]
    assert caplog.text.count("Unable to contact slurm controller; asks again for 600 s") == 1
    (tmp_path / "bin" / "asked").unlink()
    assert slurm.wait("7", 0.01) == 4


def test_a_controller_that_stays_away_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "PATIENCE_SECONDS", 0.03)
    scontrol(tmp_path / "bin", monkeypatch, "")
    with pytest.raises(LaunchUnavailable, match="Unable to contact"):
        slurm.wait("7", 0.01)


def test_a_job_that_slurm_has_forgotten_is_known_by_what_it_left(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = replace(job, directory=Path("runs/it's $HOME"))
    where = slurm.placed(job)
    where.mkdir(parents=True)
    text = slurm.script(job, Options(), tmp_path)
    in_bash(text, "exit 75")  # it was queued again
    assert not (where / "ended-7").exists()
    in_bash(text, "exit 6")
    scontrol(tmp_path / "bin", monkeypatch, "")
    state = slurm.state("7")
    assert (state.name, state.code) == ("ENDED", 6)
    assert state.output is not None and state.output.name == "slurm-7.log"
    with pytest.raises(LaunchUnavailable):
        slurm.state("8")
