"""The job file is data: it comes back as it was, and what is wrong with one is said at once."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bundle.environment import image, packages
from bundle.environment.image import BuildInfo
from bundle.environment.packages import MegatronCopies, MegatronCopy
from bundle.errors import EnvironmentUnfit, ExitCode, UsageError
from bundle.files import compute_short_json_digest
from bundle.launch import Start
from bundle.launch import job as job_file
from bundle.launch.job import Job, find_misfits, from_plan, load, parse
from bundle.patches.source import find_module_file
from bundle.planning import build_plan
from bundle.recipe import load as load_recipe

RECORD = BuildInfo(
    schema=1, stack="cpu", revision="r1", inputs="i1", python="3.11.7", sources={}, packages={"torch": "2"}
)
NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)


def made(
    *overrides: str, mcore: str = "0.16.1", nodes: int | None = None, per_node: int | None = None
) -> Job:
    recipe = load_recipe("demo", overrides)
    return from_plan(
        build_plan(recipe, backend="cpu", mcore=mcore, nodes=nodes, per_node=per_node), Path("runs/x")
    )


@pytest.fixture(scope="module")
def here() -> Job:
    """A job for the megatron-core that is installed: its patches are decided."""
    pytest.importorskip("megatron.core")
    return made(mcore="")


@pytest.fixture(scope="module")
def anywhere() -> Job:
    """A job for a mere version."""
    return made()


def test_the_engine_gets_the_kernel_of_the_plan_whatever_this_device_would_choose():
    pytest.importorskip("megatron.core")
    from bundle.backends.cuda.runtime import build_config_options

    packed = ["backend=cuda", "model.dtype=bf16", "data.packed=true", "train.micro_batch_size=1"]
    job = from_plan(
        build_plan(load_recipe("demo", packed), hardware_name="h200", mcore="0.16.1"), Path("runs/x")
    )
    assert (job.attention, job.recipe.model.attention, job.recipe_with_planned_attention.model.attention) == (
        "fused",
        "auto",
        "fused",
    )
    assert build_config_options(job.recipe, generation="10.0")["attention_backend"].name == "auto"
    assert (
        build_config_options(job.recipe_with_planned_attention, generation="10.0")["attention_backend"].name
        == "fused"
    )
    assert parse(job.to_text()).recipe_with_planned_attention == job.recipe_with_planned_attention


def signed(document: dict) -> str:
    """A file that its writer wants to be taken for one of ours."""
    return json.dumps(
        document | {"digest": compute_short_json_digest({k: v for k, v in document.items() if k != "digest"})}
    )


def changed(job: Job, **changes: object) -> str:
    return signed(job.dump() | changes)


@settings(max_examples=30, deadline=None)
@given(
    start=st.builds(Start, fresh=st.booleans(), resume=st.booleans(), origin=st.none() | NAMES.map(Path))
    | st.builds(Start, origin=NAMES.map(Path), weights_only=st.booleans()),
    directory=NAMES,
    drift=st.lists(NAMES, max_size=3).map(tuple),
    image=st.sampled_from([None, RECORD, job_file.UNDECIDED]),
    counts=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_a_job_comes_back_as_it_was(anywhere, start, directory, drift, image, counts):
    nodes, per_node = counts
    environment = anywhere.environment if nodes == 1 else {"OMP_NUM_THREADS": str(per_node)}
    told = replace(
        anywhere, start=start, directory=Path(directory), allow_drift=drift, image=image, nodes=nodes,
        per_node=per_node, environment=environment,
    )  # fmt: skip
    read = parse(told.to_text())
    assert told.to_text() is told.to_text()  # a dry run of a thousand nodes asks a thousand times
    assert (
        read == told and read.agreement_digest == told.agreement_digest and read.to_text() == told.to_text()
    )


def test_a_job_goes_on_although_the_patches_drifted_that_its_plan_was_allowed():
    drifted = ["mtp-context-parallel-roll"]
    plan = build_plan(load_recipe("demo"), backend="cpu", mcore="0.16.1", allow_drift=drifted)
    assert from_plan(plan, Path("runs/x")).allow_drift == tuple(drifted)


def test_its_patches_come_back_too_or_are_left_open(here, anywhere):
    assert parse(here.to_text()).patches == here.patches and here.patches and here.patches.steps
    assert (
        json.loads(anywhere.to_text())["patches"] == "undecided" and parse(anywhere.to_text()).patches is None
    )


def test_what_was_asked_for_is_what_it_says():
    told = made(
        "train.steps=77", "train.global_batch_size=64", "model.attention=unfused", nodes=2, per_node=4
    )
    document = json.loads(told.to_text())
    assert document["recipe"]["train"]["steps"] == 77
    assert (document["nodes"], document["per_node"], document["attention"]) == (2, 4, "unfused")
    assert document["environment"]["CUDA_VISIBLE_DEVICES"] == ""
    assert document["plan"]["layout"]["world"] == 8
    assert (document["backend"], document["megatron"]) == ("cpu", "0.16.1")


@pytest.mark.parametrize(
    "other",
    [
        {"backend": "cuda"}, {"nodes": 3}, {"per_node": 5}, {"environment": {"X": "1"}}, {"image": RECORD},
        {"start": Start(fresh=True)}, {"start": Start(origin=Path("x"), weights_only=True)},
        {"megatron": "0.17.0"}, {"attention": "flash"}, {"image": "undecided"},
    ],
)  # fmt: skip
def test_whatever_is_executed_is_in_the_digest(anywhere, other):
    (name,) = other
    assert replace(anywhere, **other).agreement_digest != anywhere.agreement_digest, name


def test_what_is_of_one_machine_is_not_in_the_digest(anywhere):
    elsewhere = replace(anywhere, directory=Path("/other"), plan={"hardware": "another"})
    assert elsewhere.agreement_digest == anywhere.agreement_digest


def test_nodes_may_differ_in_variables_that_yield_and_in_no_others(anywhere):
    def digest(**changes):
        return replace(anywhere, environment=anywhere.environment | changes).agreement_digest

    assert "OMP_NUM_THREADS" in anywhere.environment
    assert digest(OMP_NUM_THREADS="3") == digest(OMP_NUM_THREADS="8") == anywhere.agreement_digest
    assert digest(CUDA_DEVICE_MAX_CONNECTIONS="32") != anywhere.agreement_digest


@pytest.mark.parametrize("version", [0, 2, "1", None, [1]])
def test_another_version_is_refused_by_name(anywhere, version, messages):
    with pytest.raises(UsageError) as refused:
        parse(changed(anywhere, version=version))
    messages(refused.value)
    assert f"version {version!r}" in str(refused.value)


def test_no_byte_of_a_value_can_change_unseen(anywhere):
    document = anywhere.dump()
    document["recipe"]["train"]["steps"] += 1
    with pytest.raises(UsageError, match="digest"):
        parse(json.dumps(document))
    with pytest.raises(UsageError, match="not JSON"):
        parse(anywhere.to_text()[:-100])


HOSTILE = {
    "another program's": (lambda job: '{"schema": 1}', "not a job"),
    "a list": (lambda job: "[1]", "not a job"),
    "nothing": (lambda job: "", "not JSON"),
    "not a number": (lambda job: '{"format": NaN}', "NaN"),
    "a very long number": (lambda job: '{"format": 1' + "0" * 5000 + "}", "not JSON"),
    "nested without end": (lambda job: '{"a":' * 100_000, "not JSON"),
    "binary": (lambda job: b"\xff\xfe\x00", "not JSON"),
    "an unknown key": (lambda job: changed(job, hook="x"), "hook: "),
    "a missing key": (
        lambda job: signed({k: v for k, v in job.dump().items() if k != "nodes"}),
        "nodes: ",
    ),
    "no ranks": (lambda job: changed(job, nodes=0), "nodes: "),
    "half a rank": (lambda job: changed(job, per_node=1.5), "per_node: "),
    "yes for a number": (lambda job: changed(job, nodes=True), "nodes: "),
    "another accelerator": (lambda job: changed(job, backend="../x"), "backend: "),
    "a variable of the loader": (
        lambda job: changed(job, environment={"LD_PRELOAD": "/tmp/x.so"}),
        "environment: 'LD_PRELOAD'",
    ),
    "a null in a path": (lambda job: changed(job, directory="a\0b"), "directory: "),
    "patches that are none": (lambda job: changed(job, patches={"schema": 1}), "schema"),
    "a step of numbers": (
        lambda job: changed(job, patches=steps(target=5)),
        "steps: target",
    ),
    "a recipe that is none": (lambda job: changed(job, recipe={"name": "x"}), "its recipe"),
}


def steps(**changes: object) -> dict:
    """A plan of patches with one step, which would run a shell if it were believed."""
    step = {
        "patch": "mtp-zero-layers", "target": "megatron.core.optimizer:get_megatron_optimizer",
        "wrapper": "os:system", "file": "x.py", "file_digest": "", "code_file": "x.py", "fingerprint": "",
        "wrapper_digest": "", "everywhere": True,
    }  # fmt: skip
    named = {"version": "0.16.1", "commit": None}
    return {"schema": 2, "megatron-core": named, "decisions": [], "steps": [step | changes], "read": {}}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_message(anywhere, tmp_path, name):
    write, why = HOSTILE[name]
    file = tmp_path / "job.json"
    text: str | bytes = write(anywhere)  # type: ignore[assignment,operator]
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError) as refused:
        load(file)
    assert str(refused.value).startswith(f"--job {file}: ") and why in str(refused.value)
    assert refused.value.code is ExitCode.USAGE and len(str(refused.value)) < 2000


def test_what_is_no_file_is_said(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, why in (("gone", "No such file"), ("pipe", "a pipe or a device"), (".", "directory")):
        with pytest.raises(UsageError, match=why):
            load(tmp_path / name)


def test_code_that_is_not_ours_is_never_a_patch(here, messages):
    told = parse(changed(here, patches=steps()))
    found = find_misfits(told, packages.detect().megatron, None)
    (refused,) = (misfit for misfit in found if "mtp-zero-layers" in misfit)
    messages(refused)
    assert "os" not in refused.split()


def copied(job: Job, directory: Path) -> MegatronCopies:
    """A copy of the files that the plan names, which may be edited."""
    core = packages.detect().megatron.core
    assert core is not None and job.patches is not None
    for module, _ in job.patches.module_digests:
        if name := find_module_file(core.root, module):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(core.root / name, directory / name)
    copy = MegatronCopy(directory / "megatron", "a copy", core.version, core.commit)
    return MegatronCopies((copy,), copy, None)


def test_each_rank_checks_the_files_that_the_plan_names(here, tmp_path):
    installed = copied(here, tmp_path)
    assert list(find_misfits(here, installed, None)) == []
    patched = {step.file for step in here.patches.steps}
    there = {module: find_module_file(tmp_path, module) for module, _ in here.patches.module_digests}
    only_read = sorted({file for file in there.values() if file} - patched)
    absent = next(f"{module.replace('.', '/')}.py" for module, file in there.items() if file is None)
    assert patched and only_read
    for name in (min(patched), only_read[0]):
        with (tmp_path / name).open("a") as file:
            file.write("\n# another line\n")
    (tmp_path / absent).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / absent).write_text("")
    named = [misfit.split()[0] for misfit in find_misfits(here, installed, None)]
    assert sorted(named) == sorted((min(patched), only_read[0], absent))


def test_each_rank_checks_that_its_wrappers_are_those_of_the_plan(here):
    patches = here.patches.dump()
    patches["steps"][0]["wrapper_digest"] = "0" * 16
    (found,) = find_misfits(parse(changed(here, patches=patches)), packages.detect().megatron, None)
    assert found.startswith(f"{patches['steps'][0]['patch']}: bundle.replacements.")


def test_another_megatron_or_none_is_said(here, anywhere, messages):
    core = packages.detect().megatron.core
    assert core is not None
    other = MegatronCopies((), core._replace(version="0.17.0"), None)
    (found,) = find_misfits(anywhere, other, None)
    messages(found)
    assert "0.16.1" in found and "0.17.0" in found
    assert list(find_misfits(here, other, None)) == [found.replace("0.16.1", str(core.version))]
    (found,) = find_misfits(anywhere, MegatronCopies((), None, None), None)
    messages(found)
    assert found.startswith("megatron-core: 0.16.1")


def test_a_job_for_an_image_is_not_decided_outside_of_it(anywhere, monkeypatch, messages):
    told = replace(anywhere, image=RECORD)
    with pytest.raises(EnvironmentUnfit, match=r"image: .* cpu,") as refused:
        job_file.decide_patches(told)
    messages(refused.value)
    monkeypatch.setattr(image, "read_own_record", lambda: RECORD)
    assert job_file.decide_patches(told).patches == made(mcore="").patches


def test_patches_for_an_image_that_nobody_describes_are_not_those_for_what_is_here():
    pytest.importorskip("megatron.core")
    plan = build_plan(load_recipe("demo"), backend="cpu")
    assert from_plan(plan, Path("runs/x")).patches is not None
    told = from_plan(plan, Path("runs/x"), record=job_file.UNDECIDED)
    assert (told.patches, told.image) == (None, job_file.UNDECIDED)


def test_the_image_of_a_job_that_leaves_it_open_is_that_of_the_first_rank(anywhere, monkeypatch):
    pytest.importorskip("megatron.core")
    told = replace(anywhere, image=job_file.UNDECIDED)
    assert told.agreement_digest not in (
        anywhere.agreement_digest,
        replace(anywhere, image=RECORD).agreement_digest,
    )
    here = packages.detect().megatron
    for record in (None, RECORD):
        assert (
            list(find_misfits(told, here, record)) == []
        )  # as whoever starts the ranks of a node looks at it
        monkeypatch.setattr(image, "read_own_record", lambda record=record: record)
        assert job_file.decide_patches(told).image == record
    # From then on it is that of every rank.
    (other,) = find_misfits(job_file.decide_patches(told), here, None)
    assert other.startswith("image: ") and " cpu," in other
