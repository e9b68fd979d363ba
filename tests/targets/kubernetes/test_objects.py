"""The objects of a job: as golden files, through YAML, and what no cluster would take."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bundle.errors import UsageError
from bundle.launch import grace
from bundle.launch import job as job_file
from bundle.targets import kubernetes
from bundle.targets.kubernetes.options import Options
from tests.targets.kubernetes.jobs import LEAST, everything, options_of, plain, read

GOLDEN = Path(__file__).parent / "golden"
EXAMPLES = [
    ("jobset", "wide", everything("jobset")),
    ("job", "small", replace(LEAST, form="job")),
    ("trainjob", "wide", everything("trainjob")),
    ("volcano", "npus", everything("volcano")),
    ("rayjob", "wide", everything("rayjob")),
    ("ascendjob", "npus", everything("ascendjob")),
]


def masked(text: str) -> str:
    """The documents without the job file, which changes with the package, and its digest."""
    text = re.sub(r"  job\.json: \|\n(    .*\n)+", "  job.json: |\n    ...\n", text)
    return re.sub(r"-[0-9a-f]{16}\b", "-DIGEST", text)


@pytest.mark.parametrize(("name", "job", "options"), EXAMPLES)
def test_the_objects_are_the_golden_ones(request, name, job, options):
    found = kubernetes.documents(request.getfixturevalue(job), options)
    assert masked(found) == (GOLDEN / f"{name}.yaml").read_text()


def test_every_form_has_a_golden_file():
    assert {name for name, _, _ in EXAMPLES} == set(kubernetes.FORMS)


def test_the_job_file_comes_through_yaml_as_it_is(jobs):
    for job in jobs:
        for options in options_of(job):
            objects = read(kubernetes.documents(job, options))
            assert objects[0]["data"]["job.json"] == job.text()
            assert job_file.parse(objects[0]["data"]["job.json"]).digest == job.digest


def test_all_that_no_cluster_takes_is_refused_at_once(small):
    options = Options(
        image="a b",
        claim="",
        name="x" * 60,
        form="pod",
        mounts=("data",),
        device="a/b/c",
        resources=("memory",),
        selectors=("pool",),
        shared_memory="much",
        secret="No",
        queue="-",
    )
    with pytest.raises(UsageError) as refused:
        kubernetes.objects(small, options)
    for option in (
        *("--name", "--form", "--image", "--claim ''", "--mount", "--device", "--resource", "--selector"),
        *("--shared-memory", "--secret", "--queue"),
    ):
        assert f"- {option}" in str(refused.value)


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ("is for ascend, and the job for cpu", {"form": "ascendjob"}),
        ("takes the number of a tier", {"form": "volcano", "topology": "rack"}),
        ("has no such thing", {"form": "ascendjob", "topology": "rack"}),
        ("takes at most 47 characters", {"form": "rayjob", "name": "x" * 48}),
        ("asks for no device", {"device": "example.com/gpu"}),
    ],
)
def test_what_a_form_cannot_say_is_refused(small, said, options):
    with pytest.raises(UsageError, match=said):
        kubernetes.objects(small, replace(LEAST, **options))


def test_a_job_file_too_large_for_a_configmap_is_refused(small):
    large = replace(small, plan=small.plan | {"note": "x" * kubernetes._LARGEST_FILE})
    with pytest.raises(UsageError, match="more than a ConfigMap holds"):
        kubernetes.objects(large, LEAST)


TEXT = st.text(max_size=20)
HOSTILE = (
    st.builds(
        lambda name: {"name": name}, st.text(max_size=70) | st.from_regex("[a-z-]{1,63}", fullmatch=True)
    )
    | st.builds(lambda path: {"mounts": (f"data:/{path}",)}, TEXT)
    | st.builds(lambda amount: {"resources": (f"memory={amount}",)}, TEXT)
    | st.builds(
        lambda value: {"selectors": (f"pool={value}",)}, TEXT | st.sampled_from(["yes", "1e3", "0x1"])
    )
    | st.builds(
        lambda image: {"image": image},
        TEXT | st.sampled_from(["*a", "&a", "!!python", "a: b", "#", "{a}", "yes", "1e3", "null", "'", '"']),
    )
)


@settings(max_examples=80)
@given(form=st.sampled_from(["jobset", "job", "trainjob", "volcano", "rayjob"]), hostile=HOSTILE)
def test_hostile_values_are_refused_or_come_through_yaml_as_they_are(small, form, hostile):
    options = replace(LEAST, form=form, **hostile)
    try:
        objects = kubernetes.objects(small, options)
    except UsageError:
        return
    assert read(kubernetes.documents(small, options)) == plain(objects)
    assert re.fullmatch(r"[a-z0-9-]{1,63}", objects[-1]["metadata"]["name"])


def test_a_device_is_called_what_its_vendor_calls_it_or_the_cluster(wide, npus, small):
    def limits(job, options):
        return kubernetes.objects(job, options)[-1]["spec"]["template"]["spec"]["containers"][0]["resources"]

    least = replace(LEAST, form="job")
    assert limits(wide, least)["limits"] == {"nvidia.com/gpu": "8"}
    assert limits(npus, least)["limits"] == {"huawei.com/Ascend910": "16"}
    assert limits(replace(npus, generation="a5"), least)["limits"] == {"huawei.com/npu": "16"}
    assert limits(small, least)["limits"] == {}
    named = replace(least, device="example.com/gpu", resources=("cpu=8",))
    assert limits(wide, named)["limits"] == {"example.com/gpu": "8", "cpu": "8"}


def test_pods_have_the_time_that_their_checkpoint_takes(wide):
    least = replace(LEAST, form="job")

    def seconds(job, options=least):
        pod = kubernetes.objects(job, options)[-1]["spec"]["template"]["spec"]
        return pod["terminationGracePeriodSeconds"]

    large = replace(wide, plan=wide.plan | {"checkpoint": {"bytes": 10**13}})
    assert seconds(wide) == 300
    assert seconds(large) == 300 + 10_000  # a quarter of a gigabyte a second, on each of four nodes
    assert seconds(replace(large, nodes=8)) == grace.seconds(replace(large, nodes=8)) == 300 + 5_000
    assert seconds(large, replace(least, grace_seconds=60)) == 60


def test_a_thousand_nodes_are_one_more_number(wide, npus):
    for job in (wide, npus):
        many = replace(job, nodes=1024)
        for options in options_of(job):
            few = len(kubernetes.documents(job, options))
            assert len(kubernetes.documents(many, options)) < few + 200
