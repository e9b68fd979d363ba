"""What sbatch, scontrol and scancel are asked, by stand-ins for them. Real ones: test_slurm_runs.py."""

import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from bundle.errors import TargetUnavailable, UsageError
from bundle.launch.job import Job
from bundle.targets import ray, slurm, states
from bundle.targets.slurm import batch
from bundle.targets.slurm.options import SlurmOptions
from tests.targets.batch_scripts import decided, in_bash


@pytest.fixture(scope="module")
def job() -> Job:
    return decided()


def clients(folder: Path, monkeypatch: pytest.MonkeyPatch, **does: str) -> None:
    """Puts clients of Slurm on the PATH that do that."""
    folder.mkdir(exist_ok=True)
    for name, script in does.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


def test_without_slurm_it_is_said_and_no_job_is_submitted(job, tmp_path, monkeypatch, messages):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TargetUnavailable, match="sbatch") as error:
        slurm.submit(replace(job, directory=tmp_path / "run"), SlurmOptions(), tmp_path)
    messages(error.value)


@pytest.mark.parametrize("through", [False, True])
def test_a_stopped_job_is_told_to_save_and_is_not_queued_again(job, tmp_path, monkeypatch, through):
    job = replace(job, directory=tmp_path / "run")
    where = batch.get_job_directory(job)
    where.mkdir(parents=True)
    text = batch.build_script(job, SlurmOptions(), tmp_path)
    assert "requeue" in in_bash(text, "exit 75")
    (output,) = (line.partition("=")[2] for line in text.splitlines() if line.startswith("#SBATCH --output="))
    if through:
        (where / ray.TOKEN_NAME).touch()
    said = f"JobId=7 JobState=RUNNING ExitCode=0:0 StdOut={output.replace('%j', '7')}"
    clients(tmp_path / "bin", monkeypatch, scontrol=f"echo '{said}'", scancel=f'echo "$@" >{tmp_path}/asked')
    slurm.request_stop("7")
    assert (tmp_path / "asked").read_text() == f"{'--batch ' if through else ''}--signal=TERM 7\n"
    for code, words in ((75, ["scancel", "7"]), (143, ["scancel", "7"]), (1, [])):
        asked = in_bash(text, f"exit {code}")
        assert "requeue" not in asked and asked[len(asked) - len(words) :] == words
        assert ("scancel" in asked) == bool(words)
        # Slurm's record of the job is that of a cancelled one, whose script says how its ranks ended.
        for state in ("RUNNING", "COMPLETING", "CANCELLED"):
            answer = said.replace("RUNNING", state)
            clients(tmp_path / "bin", monkeypatch, scontrol=f"echo '{answer}'")
            assert slurm.query_state("7")[::2] == (state, code)
    clients(tmp_path / "bin", monkeypatch, scontrol=f"echo '{said.replace('RUNNING', 'PENDING')}'")
    assert not slurm.query_state("7").has_ended


def test_a_job_that_starts_again_has_not_ended(job, tmp_path):
    job = replace(job, directory=tmp_path / "run")
    where = batch.get_job_directory(job)
    where.mkdir(parents=True)
    text = batch.build_script(job, SlurmOptions(), tmp_path)
    in_bash(text, "exit 6")
    assert (where / "ended-7").read_text() == "6\n"
    in_bash(text, f"[ ! -e {where}/ended-7 ] && exit 75")
    assert not (where / "ended-7").exists()


@pytest.mark.parametrize("answer", ["JobState=RUNNING", ""])
def test_slurm_is_asked_seldom_and_at_once_when_the_script_has_ended(tmp_path, monkeypatch, answer):
    log, asked, seconds = tmp_path / "slurm-7.log", tmp_path / "asked", [0.0]
    first = f"JobId=7 JobState=RUNNING StdOut={log}"
    said = f"echo 'JobId=7 {answer} ExitCode=0:0 StdOut={log}'" if answer else "exit 1"
    script = f"echo x >>{asked}; [ $(wc -l <{asked}) = 1 ] && echo '{first}' || {said}"
    clients(tmp_path / "bin", monkeypatch, scontrol=script)

    def sleep(interval: float) -> None:
        seconds[0] += interval
        log.write_text(f"{log.read_text() if log.exists() else ''}{seconds[0]:.0f} ")
        if seconds[0] >= 61:
            (tmp_path / "ended-7").write_text("4\n")

    monkeypatch.setattr(slurm, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    monkeypatch.setattr(states, "time", SimpleNamespace(sleep=sleep))
    if answer:
        texts = list(slurm.follow("7"))
        assert "".join(texts).split() == [str(second) for second in range(2, 63, 2)] and len(texts) == 31
        assert seconds[0] == 62
        assert len(asked.read_text().split()) == 5  # at 0, 16, 32 and 48 s, and at the end
        assert slurm.wait("7") == 4
    else:  # a controller that does not answer is not asked more often
        patient = partial(states.yield_polled_states, patience_seconds=40)
        monkeypatch.setattr("bundle.targets.slurm.yield_polled_states", patient)
        with pytest.raises(TargetUnavailable):
            slurm.wait("7")
        assert len(asked.read_text().split()) <= seconds[0] // 15 + 2


def test_a_job_that_cannot_be_kept_from_the_queue_is_not_told_to_save(tmp_path, monkeypatch, messages):
    said = f"JobId=7 JobState=RUNNING ExitCode=0:0 StdOut={tmp_path}/gone/slurm-7.log"
    clients(tmp_path / "bin", monkeypatch, scontrol=f"echo '{said}'", scancel=f'echo "$@" >{tmp_path}/asked')
    with pytest.raises(TargetUnavailable, match=f"{tmp_path}/gone") as error:
        slurm.request_stop("7")
    messages(error.value)
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    "name",
    [
        *("SBATCH_OUTPUT", "SBATCH_ERROR", "SBATCH_WAIT", "SBATCH_ARRAY_INX"),
        *("SBATCH_TIMELIMIT", "SBATCH_SIGNAL", "SBATCH_NO_REQUEUE", "SBATCH_OPEN_MODE"),
        *("SBATCH_GRES", "SBATCH_GPUS_PER_NODE", "SBATCH_MEM_PER_CPU"),
    ],
)
def test_a_variable_that_wins_over_the_script_is_refused_and_nothing_is_written(
    job, tmp_path, monkeypatch, name, messages
):
    clients(tmp_path / "bin", monkeypatch, sbatch="echo 7")
    monkeypatch.setenv(name, "x")
    monkeypatch.setenv("SBATCH_PARTITION", "gpu")
    with pytest.raises(UsageError, match=name) as error:
        slurm.submit(replace(job, directory=tmp_path / "run"), SlurmOptions(), tmp_path)
    messages(error.value)
    assert not (tmp_path / "run").exists()
    monkeypatch.delenv(name)
    assert slurm.submit(replace(job, directory=tmp_path / "run"), SlurmOptions(), tmp_path) == "7"


def test_a_job_whose_number_sbatch_did_not_say_is_looked_up(job, tmp_path, monkeypatch, messages):
    job = replace(job, directory=tmp_path / "a run")
    monkeypatch.setattr(slurm, "PATIENCE_SECONDS", 1)
    ours = f"Command={batch.get_job_directory(job) / 'job.sh'} WorkDir=/w"
    jobs = [
        "JobId=9 JobName=x JobState=RUNNING Command=/another/job.sh WorkDir=/w",
        f"JobId=8 JobName=x JobState=CANCELLED {ours}",
        f"JobId=7 JobName=x JobState=PENDING {ours}",
    ]
    (tmp_path / "jobs").write_text("\n".join(jobs) + "\n")
    clients(tmp_path / "bin", monkeypatch, sbatch="exec sleep 30", scontrol=f"cat {tmp_path}/jobs")
    assert slurm.submit(job, SlurmOptions(), tmp_path) == "7"
    (tmp_path / "jobs").write_text("No jobs in the system\n")
    with pytest.raises(TargetUnavailable, match="within 1 s") as error:
        slurm.submit(job, SlurmOptions(), tmp_path)
    messages(str(error.value).replace(batch.get_job_directory(job).name, "slurm-DIGEST"))
    clients(tmp_path / "bin", monkeypatch, sbatch="echo Invalid partition >&2; exit 1")
    with pytest.raises(TargetUnavailable, match=r"Invalid partition$"):
        slurm.submit(job, SlurmOptions(), tmp_path)


# Of squeue's manual page, which need not end a job.
ALIVE = (
    *("CONFIGURING", "COMPLETING", "RESV_DEL_HOLD", "REQUEUE_FED", "REQUEUE_HOLD", "REQUEUED", "RESIZING"),
    *("SIGNALING", "SPECIAL_EXIT", "STAGE_OUT", "STOPPED", "SUSPENDED", "ONE_OF_TOMORROW"),
)


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
        ("JobState=BOOT_FAIL Reason=BootFail ExitCode=0:0", 5),
        ("JobState=REVOKED Reason=None ExitCode=0:0", 5),
        ("JobState=DEADLINE Reason=DeadLine ExitCode=0:0", 143),
        ("JobState=PREEMPTED Reason=None ExitCode=0:0", 143),
        ("JobState=OUT_OF_MEMORY Reason=OutOfMemory ExitCode=0:125", 253),
        ("JobState=FAILED Reason=JobLaunchFailure ExitCode=0:0", 1),
        *((f"JobState={name} Reason=None ExitCode=0:0", None) for name in ALIVE),
    ],
)
def test_a_job_ends_with_its_own_code(tmp_path, monkeypatch, said, code):
    tool = tmp_path / "scontrol"
    tool.write_text(f"#!/bin/sh\necho 'JobId=7 JobName=a b=c {said} StdOut=/runs/my run/x.log'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    state = slurm.query_state("7")
    assert (state.code, state.output) == (code, Path("/runs/my run/x.log"))
    assert state.name == said.split()[0].removeprefix("JobState=")


def test_an_answer_without_a_state_is_none(tmp_path, monkeypatch, messages):
    clients(tmp_path, monkeypatch, scontrol="echo")
    with pytest.raises(TargetUnavailable, match="job 7") as error:
        slurm.query_state("7")
    messages(error.value)


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
    tmp_path, monkeypatch, caplog, messages
):
    log = tmp_path / "x.log"
    log.write_text("0: all of it\n")
    running, ended = (
        f"JobId=7 JobState={state} ExitCode=4:0 StdOut={log}" for state in ("RUNNING", "FAILED")
    )
    monkeypatch.setattr(slurm, "QUERY_SECONDS", 0.0)
    scontrol(tmp_path / "bin", monkeypatch, running, "", "", running, ended)
    assert list(slurm.follow("7", 0.01)) == ["0: all of it\n"]
    (warning,) = (message for message in caplog.messages if "slurm controller" in message)
    assert "600 s" in warning
    messages(warning)
    (tmp_path / "bin" / "asked").unlink()
    assert slurm.wait("7", 0.01) == 4


def test_a_controller_that_stays_away_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "PATIENCE_SECONDS", 0.03)
    scontrol(tmp_path / "bin", monkeypatch, "")
    with pytest.raises(TargetUnavailable, match="slurm controller"):
        slurm.wait("7", 0.01)


def test_a_job_that_slurm_has_forgotten_is_known_by_what_it_left(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = replace(job, directory=Path("runs/it's $HOME"))
    where = batch.get_job_directory(job)
    where.mkdir(parents=True)
    text = batch.build_script(job, SlurmOptions(), tmp_path)
    in_bash(text, "exit 75")  # it was queued again
    assert not (where / "ended-7").exists()
    in_bash(text, "exit 6")
    scontrol(tmp_path / "bin", monkeypatch, "")
    state = slurm.query_state("7")
    assert (state.name, state.code) == ("ENDED", 6)
    assert state.output is not None and state.output.name == "slurm-7.log"
    with pytest.raises(TargetUnavailable):
        slurm.query_state("8")
