"""The batch script, as Slurm and bash read it. What a scheduler does with it: test_slurm_runs.py."""

import json
import shlex
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bundle.checkpoints.directory import CheckpointDirectory
from bundle.errors import UsageError
from bundle.launch import verdict
from bundle.launch.job import Job
from bundle.runs.directory import RunDirectory
from bundle.targets import docker, ray
from bundle.targets.slurm import batch
from bundle.targets.slurm.options import CONTAINER_RUNTIMES, SlurmOptions
from tests.command import run_bundle
from tests.targets.batch_scripts import decided, in_bash
from tests.targets.stderr import drop_times

GOLDEN = Path(__file__).parent / "golden"
H200, A3 = ("cuda", "h200", 2, 8), ("ascend", "a3", 1, 4)


def hostile(but: str) -> st.SearchStrategy[str]:
    """Whatever a path or a name may hold, but what is refused: control characters, and some others."""
    characters = st.characters(exclude_categories=("C", "Z"), exclude_characters=but)
    return st.text(characters, min_size=1, max_size=20)


@pytest.fixture(scope="module")
def job() -> Job:
    return decided(*H200)


@pytest.mark.parametrize(
    ("name", "machine", "options"),
    [
        ("bare", H200, SlurmOptions(python="/venv/bin/python")),
        ("spares", H200, SlurmOptions(python="/venv/bin/python", spares=2)),
        ("ray", H200, SlurmOptions(python="/venv/bin/python", ray=True, restarts=2)),
        (
            "pyxis",
            H200,
            SlurmOptions(
                image="registry.example:5000/us/bundle:1", mounts=("/data", "/models:/m:ro"), rdma=True
            ),
        ),
        (
            "apptainer",
            H200,
            SlurmOptions(
                image="/images/bundle.sif", container="apptainer", sbatch=("time=4:00:00",), rdma=True
            ),
        ),
        ("npus", A3, SlurmOptions(image="bundle")),
    ],
)
def test_the_scripts_are_the_golden_ones(name, machine, options):
    job = decided(*machine)
    found = batch.build_script(job, options, Path("/work"))
    golden = GOLDEN / f"slurm-{name}.sh"
    # The name of the folder is a digest of the whole job, which changes with the package.
    assert found.replace(batch.get_job_directory(job).name, "slurm-DIGEST") == golden.read_text()


@settings(max_examples=40)
@given(workdir=hostile("%"), directory=hostile("%"), through=st.booleans())
def test_hostile_paths_reach_srun_as_they_are(job, workdir, directory, through):
    job = replace(job, directory=Path(f"/runs/{directory}"))
    text = batch.build_script(job, SlurmOptions(ray=through), Path(f"/w/{workdir}"))
    assert f"--job={batch.get_job_directory(job) / 'job.json'}" in in_bash(text)[-3:]
    (said,) = (line for line in text.splitlines() if line.startswith("#SBATCH --chdir="))
    assert shlex.split(said)[1] == f"--chdir={Path(f'/w/{workdir}')}"


@settings(max_examples=40)
@given(
    image=hostile(""),
    mount=hostile(',"$`\\'),
    workdir=hostile(',:"$`\\'),
    directory=hostile('%,:"$`\\'),
    container=st.sampled_from(CONTAINER_RUNTIMES),
)
def test_hostile_names_reach_a_container_as_they_are(job, image, mount, workdir, directory, container):
    job = replace(job, directory=Path(f"/runs/{directory}"))
    options = SlurmOptions(image=f"/images/{image}", container=container, mounts=(f"/data/{mount}",))
    words = in_bash(batch.build_script(job, options, here := Path(f"/w/{workdir}")))
    assert f"--job={batch.get_job_directory(job) / 'job.json'}" == words[-1]
    assert any(word.endswith(f"/images/{image}") for word in words)
    both = f"/data/{mount}" if ":" in mount else f"/data/{mount}:/data/{mount}"
    assert any(both in word for word in words)
    assert any(f"{here}:{here}" in word for word in words)


@pytest.mark.parametrize("container", CONTAINER_RUNTIMES)
def test_a_container_is_shown_the_nodes_of_npus_and_the_files_of_their_driver_as_docker_shows_them(container):
    job = decided(*A3)
    options = SlurmOptions(image="/images/bundle.sif", container=container, rdma=True)
    words = in_bash(batch.build_script(job, options, Path("/work")))
    if container == "pyxis":
        (said,) = (word for word in words if word.startswith("--container-mounts="))
        mounts = said.partition("=")[2].split(",")
    else:
        mounts = [word for before, word in pairwise(words) if before == "--bind"]
    shown = [word.partition("=")[2] for word in docker.list_npu_options(job.per_node)]
    wanted = [word if ":" in word else f"{word}:{word}" for word in shown]
    assert mounts[2:] == [*wanted, "/dev/infiniband:/dev/infiniband"]


def test_memory_stays_in_place_as_far_as_the_node_allows(job):
    said = "ulimit -Sl 1\n" + batch.build_script(job, SlurmOptions(rdma=True), Path("/work"))
    soft, hard = in_bash(said, "printf '%s\\0%s\\0' $(ulimit -Sl) $(ulimit -Hl) >&3; exit 0")[-2:]
    assert soft == hard != "1"


def test_a_job_that_was_told_to_save_is_queued_again_and_no_other(job, tmp_path):
    job = replace(job, directory=tmp_path / "it's $HOME")
    text = batch.build_script(job, SlurmOptions(), Path("/work"))
    assert in_bash(text, "exit 75")[-2:] == ["requeue", "7"]
    for code in (0, 1, 2, 6, 143):
        assert "requeue" not in in_bash(text, f"exit {code}")
    where = batch.get_job_directory(job)
    where.mkdir(parents=True)
    (where / "stopped-7").touch()
    assert "requeue" not in in_bash(text, "exit 75")


def test_a_script_that_slurm_ends_writes_a_verdict_on_the_nodes_that_are_down(job, tmp_path):
    job = replace(job, directory=tmp_path / "it's $HOME")
    file, log = batch.get_job_directory(job) / "verdict-7.json", tmp_path / "log"
    file.parent.mkdir(parents=True)
    text = batch.build_script(job, SlurmOptions(), Path("/work"))
    for names, ended in (("", True), ("gpu08\\ngpu07\\ngpu08\\n", False), ("gpu08\\ngpu07\\n", True)):
        look = f"[ ! -e {shlex.quote(str(file))} ] || printf 'written\\0' >&3"  # while the step still runs
        step = f"kill -TERM $$; sleep 0.5; {look}" if ended else "exit 0"
        words = in_bash(f"sinfo() {{ printf '{names}'; }}\n{text}", step, log)
        assert ("written" in words) is bool(names and ended)
        assert file.exists() is bool(names and ended) and (file.with_name("ended-7").exists() is not ended)
        assert "requeue" not in words
    values = json.loads(file.read_text())
    lost = verdict.parse(values)
    assert (lost.kind, lost.node, lost.action) == ("lost node", "gpu07, gpu08", "restart without node")
    assert log.read_text().splitlines()[-1] == values["sentence"] == lost.sentence


@pytest.mark.parametrize(
    ("steps", "starts"),
    [
        ((1, 2, 3), 3),  # one each: told to save while it starts
        ((400, 401, 402), 4),  # the fourth start looks at three: 400, 401 and 402, and came to 403
        ((1, 2, 40, 41, 42), 6),
        ((0, 0, 0), 3),
    ],
)
def test_starts_that_come_to_one_step_each_end(job, tmp_path, steps, starts):
    job = replace(job, directory=tmp_path / "it's $HOME")
    checkpoints = RunDirectory(job.directory).checkpoints
    text, log = batch.build_script(job, SlurmOptions(), Path("/work")), tmp_path / "log"
    batch.get_job_directory(job).mkdir(parents=True)
    checkpoints.mkdir()
    for number in range(starts):
        step = steps[number] if number < len(steps) else steps[-1] + number - len(steps) + 1
        saved = CheckpointDirectory(tmp_path / str(number))
        saved.create_sole_partial(step)
        saved.publish(step, keep=1)
        saves = f"cp {saved.root}/latest {shlex.quote(str(checkpoints))}; exit 75"
        again = in_bash(text, saves, log)[-2:] == ["requeue", "7"]
        assert again is (number < starts - 1), log.read_text()
    assert "not queued" in log.read_text()
    assert (batch.get_job_directory(job) / "ended-7").read_text() == "75\n"


def test_a_job_that_slurm_does_not_queue_again_has_ended(job, tmp_path):
    job = replace(job, directory=tmp_path)
    batch.get_job_directory(job).mkdir(parents=True)
    text = batch.build_script(job, SlurmOptions(), Path("/work"))
    in_bash("scontrol() { return 1; }\n" + text, "exit 75")
    assert (batch.get_job_directory(job) / "ended-7").read_text() == "75\n"


def refused(job: Job, options: SlurmOptions, workdir: str = "/work") -> str:
    with pytest.raises(UsageError) as error:
        batch.build_script(job, options, Path(workdir))
    return str(error.value)


def test_all_that_cannot_be_written_is_refused_at_once(job, messages):
    options = SlurmOptions(
        sbatch=("--time=1", "comment=a\nb", "x=1", "nodes=4"), mounts=("/a,b", "/c"), container="docker"
    )
    text = refused(replace(job, directory=Path("/runs/%j")), options)
    for part in ("'--time=1'", "'comment=a\\nb'", "'docker'", "--image", "'/runs/%j'", "'nodes=4'"):
        assert part in text, text
    assert "'x=1'" not in text
    messages(text)


@pytest.mark.parametrize(
    "option",
    (
        *("output=/tmp/x/%j.out", "error=x", "out=x", "wait", "test-only", "parsable", "help"),
        *("array=0-1", "ar=1-2", "wrap=id", "nodes=4", "ntasks=2", "ntasks-per=2", "clusters=other"),
    ),
)
def test_an_option_that_launch_stands_on_is_refused_by_its_name_and_by_its_abbreviation(
    job, option, messages
):
    text = refused(job, SlurmOptions(sbatch=(option,)))
    assert f"--sbatch '{option}'" in text
    messages(text)


def test_options_that_only_begin_alike_are_said(job):
    options = ("wait-all-nodes=1", "export=ALL", "nodelist=a", "no-requeue", "hold", "quiet", "array-like=1")
    text = batch.build_script(job, SlurmOptions(sbatch=options), Path("/work"))
    assert {f"#SBATCH --{option}" for option in options} <= set(text.splitlines())


@pytest.mark.parametrize("time", ["4", "5:59", "0:06:00", "0-0:6", "6"])
def test_a_time_limit_in_which_a_job_only_saves_is_refused(job, time, messages):
    # Five minutes to save; Slurm may say it one earlier.
    for option in (f"time={time}", f"time-min={time}"):
        text = refused(job, SlurmOptions(sbatch=(option,)))
        assert f"--sbatch {option}" in text and "360 s" in text and "6 minutes" in text
        messages(text)
    assert batch.build_script(job, SlurmOptions(sbatch=(f"time={time}", "signal=TERM@30")), Path("/work"))


@pytest.mark.parametrize("time", ["7", "6:01", "1:00:00", "1-0", "0-1:00", "2-0:0:1", "0", "UNLIMITED"])
def test_any_other_time_limit_is_taken(job, time):
    assert f"#SBATCH --time={time}\n" in batch.build_script(
        job, SlurmOptions(sbatch=(f"time={time}",)), Path("/work")
    )


@pytest.mark.parametrize("container", CONTAINER_RUNTIMES)
def test_a_path_that_a_container_would_read_as_two_is_refused(job, container, messages):
    job = replace(job, directory=Path("/runs/x,y:z"))
    options = SlurmOptions(image="/images/x.sif", container=container, mounts=("/data/a,b", "/c:/d"))
    text = refused(job, options, "/wo:rk")
    violations = text.splitlines()[1:]
    named = {"/wo:rk": " ':'", "/runs/x,y:z": " ',' or ':'", "/data/a,b": " ','"}
    for line, (path, characters) in zip(violations, named.items(), strict=True):
        assert f"'{path}'" in line and line.endswith(characters)
    messages(text)
    assert batch.build_script(job, SlurmOptions(), Path("/wo:rk"))  # without a container nothing parts them
    own = {"pyxis": "/runs/$x", "apptainer": "/runs/a\\b"}[container]
    job = replace(job, directory=Path(own))
    assert repr(own) in refused(job, replace(options, mounts=()))


@pytest.mark.parametrize("image", ["repo/name:tag", "registry.example:5000/us/bundle:1", "bundle"])
def test_to_apptainer_an_image_is_a_file_or_says_what_it_is(job, image, messages):
    options = SlurmOptions(image=image, container="apptainer")
    text = refused(job, options)
    assert f"docker://{image}" in text
    messages(text)
    for name in (f"docker://{image}", "/images/x", "./x", "../x", "images/x.sif"):
        assert name in in_bash(batch.build_script(job, replace(options, image=name), Path("/work")))
    assert batch.build_script(job, replace(options, container="pyxis"), Path("/work"))


def test_through_ray_no_signal_reaches_it_and_the_step_is_waited_for_to_its_end(job, tmp_path, messages):
    job = replace(job, directory=tmp_path / "it's $HOME")
    where = batch.get_job_directory(job)
    where.mkdir(parents=True)
    (where / ray.STOP_NAME).touch()  # of a start before this one
    text = batch.build_script(job, SlurmOptions(ray=True), Path("/work"))
    assert "#SBATCH --signal=B:TERM@" in text
    # A step that tells its script to save, is told so by a file, and says that it has done so.
    stop = shlex.quote(str(where / ray.STOP_NAME))
    waits = f"for _ in $(seq 200); do [ -e {stop} ] && exit 75; sleep 0.05; done; exit 8"
    step = f"[ -e {stop} ] && exit 9; kill -TERM $$; {waits}"
    words = in_bash(text, step)
    assert words[-2:] == ["requeue", "7"]
    assert words[-5:-2] == [f"--job={where / 'job.json'}", "--restarts=0", "--start"]
    for code in (0, 6, 143):
        in_bash(text, f"exit {code}")
        assert (where / "ended-7").read_text() == f"{code}\n"
    options = SlurmOptions(ray=True, spares=1)
    with pytest.raises(UsageError, match="--spares") as error:
        batch.build_script(job, options, Path("/work"))
    messages(error.value)


def test_an_own_option_wins_and_no_option_is_said_twice(job):
    text = batch.build_script(job, SlurmOptions(sbatch=("mem=1G", "exclusive=user")), Path("/w"))
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --nodes=2", "#SBATCH --mem=1G", "#SBATCH --exclusive=user"} <= set(lines)
    names = [shlex.split(line, comments=False)[1].partition("=")[0] for line in lines]
    assert len(names) == len(set(names))


def test_what_is_in_an_image_is_said_of_one_and_need_not_be(tmp_path, messages):
    def said(*words: str) -> subprocess.CompletedProcess[str]:
        return run_bundle("launch", "slurm", "demo", "--dry-run", *words, cwd=tmp_path)

    done = said("--image-record=none")
    assert done.returncode == 2 and "--image" in done.stderr
    messages(drop_times(done.stderr))
    done = said("--image=x", "--rdma")
    assert done.returncode == 0 and "--container-image=x" in done.stdout
    assert "/dev/infiniband:/dev/infiniband" in done.stdout
    assert "megatron-core 0.16.1" in done.stderr
    messages(drop_times(done.stderr))
    for words in (("--image=x", "--image-record=none"), ()):
        assert said(*words).stderr == ""
