"""The objects of a job: what options add, through YAML, and what no cluster would take."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bundle.errors import UsageError
from bundle.launch import grace
from bundle.launch import job as job_file
from bundle.recipe import load
from bundle.targets import kubernetes
from bundle.targets.kubernetes.options import KubernetesOptions
from tests.targets.kubernetes.jobs import LEAST, everything, options_of, plain, pods, read

# What the options of `everything` add to launch/kubernetes, which has the least: in every form, and in one.
ADDED = {
    *("containers.image=registry.example/bundle@sha256:0123", "capabilities.add=IPC_LOCK"),
    *("annotations.networks.example/attach=fast, faster", "metadata.namespace=research"),
    *("nodeSelector.pool=training", "nodeSelector.topology.example/zone=", "emptyDir.sizeLimit=32Gi"),
    *("securityContext.supplementalGroups=1000", "secretRef.name=tokens", "spec.priorityClassName=high"),
    *("volumeMounts.name=mount-0", "volumeMounts.mountPath=/data", "volumes.name=mount-0"),
    *("volumeMounts.name=mount-1", "volumeMounts.mountPath=/models", "volumes.name=mount-1"),
    *("persistentVolumeClaim.claimName=data", "persistentVolumeClaim.claimName=models"),
    *("limits.cpu=64", "limits.memory=512Gi", "limits.rdma/ib=8"),
    *("requests.cpu=64", "requests.memory=512Gi", "requests.rdma/ib=8"),
    "spec.terminationGracePeriodSeconds=600",
    *("labels.cost-centre=c7", "spec.serviceAccountName=trainer", "spec.runtimeClassName=nvidia"),
    *("imagePullSecrets.name=registry", "volumes.name=host-0", "volumeMounts.name=host-0"),
    *("volumeMounts.mountPath=/scratch", "hostPath.path=/mnt/nvme", "hostPath.type=Directory"),
    *("tolerations.key=nvidia.com/gpu", "tolerations.operator=Exists", "tolerations.effect=NoSchedule"),
    *("tolerations.key=team", "tolerations.operator=Equal", "tolerations.value=rl"),
    *("tolerations.key=spot", "tolerations.value="),
    *("matchExpressions.key=topology.example/block", "matchExpressions.operator=In"),
    *("matchExpressions.values=b1", "matchExpressions.values=b2"),
    *("matchExpressions.key=kubernetes.io/hostname", "matchExpressions.operator=NotIn"),
    "matchExpressions.values=node-7",
}
KUEUE = (
    "annotations.kueue.x-k8s.io/podset-required-topology=cloud.example/rack",
    "labels.kueue.x-k8s.io/queue-name=team",
)
SECONDS, RESTARTS = "spec.ttlSecondsAfterFinished=3600", "failurePolicy.maxRestarts=3"
DRIVER = "env --chdir=/home/bundle mcore-bundle launch ray --job=/opt/job/job.json --restarts=3"
ADDED_BY_FORM = {
    "jobset": {*KUEUE, SECONDS, RESTARTS},
    "job": {*KUEUE, SECONDS},
    "trainjob": {*KUEUE, RESTARTS, "trainer.image=registry.example/bundle@sha256:0123"},
    "volcano": {
        *("networkTopology.mode=hard", "networkTopology.highestTierAllowed=2", SECONDS),
        *("spec.maxRetry=3", "spec.queue=team"),
    },
    "rayjob": {*KUEUE, "spec.backoffLimit=3", f"spec.entrypoint={DRIVER}", "env.value=600"},
    "ascendjob": {
        *("labels.fault-retry-times=3", "runPolicy.backoffLimit=3", "runPolicy.ttlSecondsAfterFinished=3600"),
        *("schedulingPolicy.priorityClass=high", "schedulingPolicy.queue=team"),
    },
}


def values(found: Any, *path: str) -> Iterator[str]:
    """Every value with the last two keys that lead to it; without a runtime's name, which has a digest."""
    if isinstance(found, dict):
        for key, inner in found.items():
            yield from values(inner, *path, key)
    elif isinstance(found, list):
        for inner in found:
            yield from values(inner, *path)
    elif not str(found).startswith("sft-"):
        yield f"{'.'.join(path[-2:])}={found}"


@pytest.mark.parametrize("form", kubernetes.FORMS_BY_NAME)
def test_each_option_adds_its_value_and_nothing_else(npus, form):
    least, most = (
        set(values(kubernetes.build_objects(npus, options)[1:]))
        for options in (replace(LEAST, form=form, name="sft"), everything(form))
    )
    assert most - least == ADDED | ADDED_BY_FORM[form]


def test_the_job_file_comes_through_yaml_as_it_is(jobs):
    for job in jobs:
        for options in options_of(job):
            objects = read(kubernetes.render_documents(job, options))
            assert objects[0]["data"]["job.json"] == job.to_text()
            assert job_file.parse(objects[0]["data"]["job.json"]).agreement_digest == job.agreement_digest


def test_all_that_no_cluster_takes_is_refused_at_once(small):
    options = KubernetesOptions(
        image="a b",
        claim="",
        name="x" * 60,
        form="pod",
        mounts=("data",),
        device="a/b/c",
        resources=("memory",),
        selectors=("pool",),
        annotations=("team",),
        shared_memory="much",
        secret="No",
        queue="-",
    )
    with pytest.raises(UsageError) as refused:
        kubernetes.build_objects(small, options)
    for option in (
        *("--name", "--form", "--image", "--claim ''", "--mount", "--device", "--resource", "--selector"),
        *("--shared-memory", "--secret", "--queue", "--annotation"),
    ):
        assert f"- {option}" in str(refused.value)


@pytest.mark.parametrize(
    ("value", "options"),
    [
        ("cpu", {"form": "ascendjob"}),
        ("--topology 'rack'", {"form": "volcano", "topology": "rack"}),
        ("--topology", {"form": "ascendjob", "topology": "rack"}),
        ("--name", {"form": "rayjob", "name": "x" * 48}),
        ("--device", {"device": "example.com/gpu"}),
    ],
)
def test_what_a_form_cannot_say_is_refused(small, value, options, messages):
    with pytest.raises(UsageError, match=value) as refused:
        kubernetes.build_objects(small, replace(LEAST, **options))
    messages(refused.value)


DEVICE, LEVEL = "nvidia.com/gpu", "kueue.x-k8s.io/podset-required-topology"
CONTRADICTIONS = [
    (f"--resource {DEVICE}", {"resources": (f"{DEVICE}=4",)}),
    ("--resource a.b/gpu", {"device": "a.b/gpu", "resources": ("a.b/gpu=8",)}),
    ("--resource 'memory'", {"resources": ("memory=100Gi", "cpu=2", "memory=200Gi")}),
    ("--selector 'a'", {"selectors": ("a=1", "a=2")}),
    ("--annotation 'a'", {"annotations": ("a=1", "a=2")}),
    (f"--annotation {LEVEL}", {"topology": "rack", "annotations": (f"{LEVEL}=host",)}),
    ("--mount '/data'", {"mounts": ("a:/data", "b:/data/")}),
    *(
        (f"--mount '{path.rstrip('/')}'", {"mounts": (f"a:{path}",)})
        for path in ("/tmp", "/tmp/", "/home/bundle", "/dev/shm", "/dev", "/opt/job", "/opt/job/x", "/proc/1")
    ),
    *(
        (f"--mount 'a:{path}'", {"mounts": (f"a:{path}",)})
        for path in ("/", "//", "/data/../tmp", "/.", "/a//b", "/a:b", "data", "")
    ),
    *(
        (f"--resource '{said}'", {"resources": (said,)})
        for said in ("memory=1..2", "memory=1gi", "memory=", "memory=.", "cpu=1e", "gpu=8", "rdma/ib=0.5")
    ),
    ("--shared-memory '1..2Gi'", {"shared_memory": "1..2Gi"}),
    ("--shared-memory 1001k", {"shared_memory": "1001k", "resources": ("memory=1M",)}),
    ("--shared-memory 1Ki", {"shared_memory": "1Ki", "resources": ("memory=1023500m",)}),
    ("--shared-memory 1e9", {"shared_memory": "1e9", "resources": ("memory=0.5Gi",)}),
    ("--label app.kubernetes.io/instance", {"labels": ("app.kubernetes.io/instance=x",)}),
    ("--label 'a b=c'", {"labels": ("a b=c",)}),
    ("--mount '/data'", {"mounts": ("a:/data",), "host_paths": ("/b:/data",)}),
    ("--service-account 'A'", {"service_account": "A"}),
    ("--runtime-class 'A'", {"runtime_class": "A"}),
    ("--image-pull-secret 'A'", {"pull_secrets": ("A",)}),
    *((f"--host-path '{path}'", {"host_paths": (path,)}) for path in ("data:/data", "/a:b", "/a:/..", "/a")),
    *(
        (f"--toleration '{value}'", {"tolerations": (value,)})
        for value in (":NoSchedule", "a:Never", "a=b c")
    ),
    *((f"--node-affinity '{value}'", {"node_affinity": (value,)}) for value in ("a", "a=", "a=b,,c")),
    ("--exclude-node 'A'", {"excluded_nodes": ("A",)}),
    ("--device 'memory'", {"device": "memory"}),
]


@pytest.mark.parametrize(("option", "options"), CONTRADICTIONS)
def test_what_cannot_be_or_contradicts_the_job_is_refused(wide, option, options, messages):
    with pytest.raises(UsageError) as refused:
        kubernetes.build_objects(wide, replace(LEAST, **options))
    (line,) = str(refused.value).splitlines()[1:]
    violation = line.strip().removeprefix("- ")
    assert violation.startswith(f"{option}: ")
    messages(violation)


def test_what_can_be_is_taken(wide):
    amounts = ("memory=64.5Gi", "cpu=500m", "hugepages-2Mi=64Mi", "ephemeral-storage=1e9", "rdma/ib=8")
    mounts = ("a:/data", "b:/data/more", "c:/home/bundle/data", "d:/tmpfs", "e:/...")
    objects = kubernetes.build_objects(wide, replace(LEAST, form="job", resources=amounts, mounts=mounts))
    (container,) = objects[-1]["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == dict(each.split("=") for each in (f"{DEVICE}=8", *amounts))
    assert [each["mountPath"] for each in container["volumeMounts"]][-5:] == [m[2:] for m in mounts]


@pytest.mark.parametrize("form", ["volcano", "ascendjob"])
def test_nodes_of_a_super_pod_get_the_block_that_mindcluster_wants(npus, form, messages):
    def annotations(*said, selectors=("accelerator-type=module-a3-16-super-pod",)):
        options = replace(LEAST, form=form, selectors=selectors, annotations=said)
        found = dict(kubernetes.build_objects(npus, options)[-1]["metadata"]["annotations"])
        assert found.pop("mcore-bundle/run-directory") == str(npus.directory)
        return found

    assert annotations() == {"sp-block": "32"}
    assert annotations("sp-block=16", "a=b") == {"sp-block": "16", "a": "b"}
    assert annotations(selectors=("accelerator-type=module-a3-16",)) == {}
    assert annotations(selectors=()) == {}
    for block in ("8", "24", "64", "", "x"):
        with pytest.raises(UsageError, match=f"sp-block='{block}'.* 16, 32") as refused:
            annotations(f"sp-block={block}")
        messages(refused.value)
    three = replace(LEAST, form=form, annotations=("sp-block=32",))
    with pytest.raises(UsageError, match="16, 48"):
        kubernetes.build_objects(replace(npus, nodes=3), three)


def test_a_job_file_too_large_for_a_configmap_is_refused(small):
    large = replace(small, plan=small.plan | {"note": "x" * kubernetes._MAX_JOB_FILE_BYTES})
    with pytest.raises(UsageError, match="ConfigMap"):
        kubernetes.build_objects(large, LEAST)


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
    | st.builds(lambda value: {"annotations": (f"team={value}",)}, TEXT | st.sampled_from(["*a", "1e3", ""]))
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
        objects = kubernetes.build_objects(small, options)
    except UsageError:
        return
    assert read(kubernetes.render_documents(small, options)) == plain(objects)
    assert re.fullmatch(r"[a-z0-9-]{1,63}", objects[-1]["metadata"]["name"])


def test_a_device_is_called_what_its_vendor_calls_it_or_the_cluster(wide, npus, small):
    def limits(job, options):
        return kubernetes.build_objects(job, options)[-1]["spec"]["template"]["spec"]["containers"][0][
            "resources"
        ]

    least = replace(LEAST, form="job")
    assert limits(wide, least)["limits"] == {"nvidia.com/gpu": "8"}
    assert limits(npus, least)["limits"] == {"huawei.com/Ascend910": "16"}
    assert limits(replace(npus, generation="a5"), least)["limits"] == {"huawei.com/npu": "16"}
    assert limits(small, least)["limits"] == {}
    named = replace(least, device="example.com/gpu", resources=("cpu=8",))
    assert limits(wide, named)["limits"] == {"example.com/gpu": "8", "cpu": "8"}


GIBIBYTE = 2**30


def find_resources(job, **options):
    pod = kubernetes.build_objects(job, replace(LEAST, form="job", **options))[-1]["spec"]["template"]["spec"]
    return pod["containers"][0]["resources"]


def with_bytes(job, checkpoint=0, **sizes):
    stages = [{"bytes": {name: size * part for name, size in sizes.items()}} for part in (1, 2)]
    return replace(job, plan=job.plan | {"stages": stages, "checkpoint": {"bytes": checkpoint}})


def test_a_pod_requests_the_processors_and_the_memory_of_the_plan(wide, small):
    # Eight ranks, each with 4 GiB, 2 x 5 GiB of the largest stage on the host, and 2 GiB of a checkpoint.
    offloaded = with_bytes(wide, checkpoint=32 * 2 * GIBIBYTE, host=5 * GIBIBYTE, total=10**15)
    assert find_resources(offloaded) == {
        "limits": {"nvidia.com/gpu": "8"},
        "requests": {"nvidia.com/gpu": "8", "cpu": "16", "memory": "128Gi"},
    }
    assert find_resources(with_bytes(wide, host=GIBIBYTE // 2 + 1))["requests"]["memory"] == "41Gi"
    on_the_host = with_bytes(small, total=3 * GIBIBYTE, host=10**15)
    assert find_resources(on_the_host)["requests"] == {"cpu": "2", "memory": "10Gi"}
    assert find_resources(replace(wide, plan={}))["requests"]["memory"] == "32Gi"


def test_a_rank_that_samples_requests_its_judges_and_the_reference_model(wide):
    recipe = load("grpo-arithmetic-cpu", ["rl.rewards=[{kind: exact}, {kind: math, processes: 3}]"])
    sampling = replace(with_bytes(wide, host=0, parameters=GIBIBYTE), recipe=recipe)
    requests = find_resources(sampling)["requests"]
    assert (requests["cpu"], requests["memory"]) == ("40", "48Gi")


def test_what_an_option_requests_is_a_limit_and_replaces_the_estimate(wide):
    resources = find_resources(with_bytes(wide, host=0), resources=("memory=1Ti",), shared_memory="1Gi")
    assert resources["limits"] == {"nvidia.com/gpu": "8", "memory": "1Ti"}
    assert resources["requests"] == {"nvidia.com/gpu": "8", "memory": "1Ti", "cpu": "16"}


@pytest.mark.parametrize("form", kubernetes.FORMS_BY_NAME)
@pytest.mark.parametrize(
    ("endpoint", "annotations"),
    [
        ("null", {}),
        ("{port: 9464}", {}),
        ("{port: 9464, address: localhost}", {}),
        ("{port: 0, address: 0.0.0.0}", {}),
        (
            "{port: 9464, address: 0.0.0.0}",
            {"prometheus.io/scrape": "true", "prometheus.io/port": "9464"},
        ),
    ],
)
def test_prometheus_finds_the_pods_whose_endpoint_it_can_reach(npus, form, endpoint, annotations):
    job = replace(npus, recipe=load("demo", [f"metrics.prometheus={endpoint}"]))
    objects = kubernetes.build_objects(job, replace(LEAST, form=form))
    for _, template in pods(objects):
        assert template["metadata"].get("annotations", {}) == annotations
        ports = template["spec"]["containers"][0].get("ports", ())
        named_ports = [port["containerPort"] for port in ports if port["name"] == "bundle-metrics"]
        assert named_ports == ([9464] if annotations else [])
    named = replace(LEAST, form=form, annotations=("prometheus.io/scrape=false",))
    for _, template in pods(kubernetes.build_objects(job, named)):
        assert template["metadata"]["annotations"]["prometheus.io/scrape"] == "false"
    if form == "rayjob":
        spec = objects[-1]["spec"]
        for template in (spec["submitterPodTemplate"], spec["rayClusterSpec"]["headGroupSpec"]["template"]):
            assert "annotations" not in template["metadata"]


def test_pods_have_the_time_that_their_checkpoint_takes(wide):
    least = replace(LEAST, form="job")

    def seconds(job, options=least):
        pod = kubernetes.build_objects(job, options)[-1]["spec"]["template"]["spec"]
        return pod["terminationGracePeriodSeconds"]

    large = replace(wide, plan=wide.plan | {"checkpoint": {"bytes": 10**13}})
    assert seconds(wide) == 300
    assert seconds(large) == 300 + 10_000  # a quarter of a gigabyte a second, on each of four nodes
    assert (
        seconds(replace(large, nodes=8))
        == grace.estimate_save_seconds(replace(large, nodes=8))
        == 300 + 5_000
    )
    assert seconds(large, replace(least, grace_seconds=60)) == 60


@pytest.mark.parametrize("form", [form for form in kubernetes.FORMS_BY_NAME if form != "rayjob"])
def test_every_pod_of_a_job_with_preflight_does_it(npus, form):
    def words(**options):
        objects = kubernetes.build_objects(npus, replace(LEAST, form=form, **options))
        return [pod["spec"]["containers"][0]["args"] for _, pod in pods(objects)]

    for plain_words, told in zip(words(), words(preflight=True), strict=True):
        assert "--preflight" in told
        assert [word for word in told if word != "--preflight"] == plain_words


def test_the_driver_of_a_rayjob_has_its_nodes_asked_first(wide):
    options = replace(LEAST, form="rayjob")
    before, told = (
        kubernetes.build_objects(wide, replace(options, preflight=asks))[-1]["spec"]["entrypoint"]
        for asks in (False, True)
    )
    assert told == f"{before} --preflight"


def test_a_thousand_nodes_are_one_more_number(wide, npus):
    for job in (wide, npus):
        many = replace(job, nodes=1024)
        for options in options_of(job):
            few = len(kubernetes.render_documents(job, options))
            assert len(kubernetes.render_documents(many, options)) < few + 200
