"""The objects of one job against each other, and against the job file inside of them, read from them alone.

What no schema says: who is asked for what index, where the pods meet, which volume a mount is of.
"""

import copy
import json
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bundle.targets import kubernetes
from tests.targets.kubernetes.jobs import Objects, everything, indexed, options_of, pods

# What each controller calls the first pod, and the variable in which it tells a pod its index.
FIRST = {
    "Job": ("{name}-0.{subdomain}:29500", "JOB_COMPLETION_INDEX"),
    "JobSet": ("{name}-node-0-0.{subdomain}:29500", "JOB_COMPLETION_INDEX"),
    "batch.volcano.sh/v1alpha1": ("{name}-node-0.{name}:29500", "VC_TASK_INDEX"),
}


def disagreements(objects: Objects) -> Iterator[str]:
    """Every way in which the objects of one job do not fit each other."""
    top, file = objects[-1], objects[0]
    decided = json.loads(file["data"]["job.json"])
    of_volcano = "volcano" in top["apiVersion"]
    if sum(count for count, _ in pods(objects)) != decided["nodes"]:
        yield "not as many pods as nodes"
    for _, template in pods(objects):
        yield from of_a_pod(template["spec"], file["metadata"]["name"], decided)
        if top["kind"] != "RayJob":
            (container,) = template["spec"]["containers"]
            if container["args"][:2] != ["train", f"--job={mounted(container).get('job')}/job.json"]:
                yield "the job file is not where the pod is told"
    if len({e["metadata"].get("namespace") for e in objects}) != 1:
        yield "not all in one namespace"
    if top["kind"] == "AscendJob":
        yield from of_an_ascendjob(top, decided)
        return
    if top["kind"] == "RayJob":
        yield from of_a_rayjob(top, decided)
        return
    if of_volcano:
        yield from of_a_volcano_job(top, decided)
    else:
        yield from of_an_indexed_job(objects, decided)
    if top["kind"] == "TrainJob":
        yield from of_a_trainjob(objects, decided)
        return
    words = pods(objects)[0][1]["spec"]["containers"][0]["args"]
    at, index = FIRST[top["apiVersion"] if of_volcano else top["kind"]]
    network = top["spec"].get("network", {})
    subdomain = network.get("subdomain") or pods(objects)[0][1]["spec"].get("subdomain")
    first = at.format(name=top["metadata"]["name"], subdomain=subdomain)
    told = [f"--nodes={decided['nodes']}", f"--node-rank=$({index})", f"--rendezvous={first}"]
    if words[2:] != (told if decided["nodes"] > 1 else []):
        yield "the rendezvous is not at the first pod, or a pod does not know which it is"


def mounted(container: dict[str, Any]) -> dict[str, str]:
    return {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}


def of_a_pod(pod: dict[str, Any], file: str, decided: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the pod of a node."""
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = mounted(container)
    if set(mounts) != set(volumes):
        yield "a mount has no volume"
    elif volumes["job"]["configMap"]["name"] != file:
        yield "the job file is not that of the ConfigMap"
    if pod["restartPolicy"] != "Never":
        yield "a container is restarted alone"
    amounts = container["resources"]
    if not amounts["limits"].items() <= amounts["requests"].items():
        yield "the pod may be evicted before others"
    if not {"cpu", "memory"} <= amounts["requests"].keys():
        yield "the scheduler does not know what the pod needs"
    devices = [n for name, n in amounts["limits"].items() if name.startswith(("nvidia.com", "huawei.com"))]
    if devices != ([] if decided["backend"] == "cpu" else [str(decided["per_node"])]):
        yield "not as many devices as ranks"
    if "spec.nodeName" not in str(container["env"]):
        yield "nobody can name the node that a verdict is about"


def of_an_indexed_job(objects: Objects, decided: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a Job, alone, in a JobSet, or in that of a runtime."""
    top, job = objects[-1], indexed(objects)
    name, pod = top["metadata"]["name"], job["template"]["spec"]
    if job["completionMode"] != "Indexed" or job["backoffLimit"] != 0:
        yield "a pod is replaced alone"
    rules = {rule["action"]: rule["onExitCodes"] for rule in job["podFailurePolicy"]["rules"]}
    if {rule["containerName"] for rule in rules.values()} != {pod["containers"][0]["name"]}:
        yield "the failure policy is about no container"
    if [rules[action]["values"] for action in ("FailJob", "Ignore")] != [[2, 3, 4], [75]]:
        yield "a code that no restart mends restarts, or one that asks for it does not"
    if top["kind"] == "Job":
        service = next(each for each in objects if each["kind"] == "Service")
        if pod["subdomain"] != service["metadata"]["name"] or service["spec"]["clusterIP"] != "None":
            yield "the pods' subdomain is no headless service"
        if service["spec"]["selector"] != {"batch.kubernetes.io/job-name": name}:
            yield "the service does not select the job's pods"
        network = service["spec"]
    else:
        inner = objects[-2]["spec"]["template"]["spec"] if top["kind"] == "TrainJob" else top["spec"]
        network = inner["network"] if inner["network"]["enableDNSHostnames"] else {}
        (rule,) = inner["failurePolicy"]["rules"]
        if rule["action"] != "FailJobSet" or rule["onJobFailureReasons"] != ["PodFailurePolicy"]:
            yield "a code that no restart mends restarts the set"
    if not network.get("publishNotReadyAddresses"):
        yield "pods have no names before they are ready"
    if top["kind"] != "TrainJob" and job["parallelism"] != job["completions"]:
        yield "not all pods at once"


def of_a_trainjob(objects: Objects, decided: dict[str, Any]) -> Iterator[str]:
    """What is wrong between a TrainJob and its runtime."""
    runtime, top = objects[-2:]
    if top["spec"]["runtimeRef"] != {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}:
        yield "the TrainJob runs in another runtime"
    inner = runtime["spec"]["template"]["spec"]
    (replicated,) = inner["replicatedJobs"]
    labels = replicated["template"]["metadata"]["labels"]
    containers = replicated["template"]["spec"]["template"]["spec"]["containers"]
    if (
        labels != {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
        or containers[0]["name"] != "node"
    ):
        yield "the controller does not find the container that trains"
    # It tells the container PET_MASTER_ADDR = {name}-node-0-0.{name}.
    if replicated["name"] != "node" or inner["network"]["subdomain"] != top["metadata"]["name"]:
        yield "the first pod is not where the controller says"
    trainer = top["spec"]["trainer"]
    if "torch" not in runtime["spec"]["mlPolicy"] or trainer["numProcPerNode"] != decided["per_node"]:
        yield "the container is not told which node it is"
    if trainer["args"][2:]:
        yield "the container is told twice which node it is"


def of_a_volcano_job(top: dict[str, Any], decided: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a Job of Volcano."""
    spec = top["spec"]
    if spec["minAvailable"] != decided["nodes"] or spec["schedulerName"] != "volcano":
        yield "some pods start without the others"
    if "env" not in spec["plugins"] or "--publish-not-ready-addresses=true" not in spec["plugins"]["svc"]:
        yield "pods do not know their index, or have no names before they are ready"
    # The first policy that fits an event or a code is taken, and both come together.
    found = {code: first(spec["policies"], code) for code in (2, 3, 4, 1, 75, 137)}
    if [found[code] for code in (2, 3, 4)] != ["TerminateJob"] * 3:
        yield "a code that no restart mends restarts"
    if [found[code] for code in (1, 75, 137)] != ["RestartJob"] * 3:
        yield "a pod that fails does not restart the job"
    if decided["backend"] == "ascend":
        container = spec["tasks"][0]["template"]["spec"]["containers"][0]
        variables = {each["name"]: each["valueFrom"] for each in container["env"]}
        (asked,) = (name for name in container["resources"]["limits"] if name.startswith("huawei.com/"))
        field = {"fieldRef": {"fieldPath": f"metadata.annotations['{asked}']"}}
        if variables.get("ASCEND_VISIBLE_DEVICES") != field:
            yield "Ascend Docker Runtime mounts no device"


def first(policies: list[dict[str, Any]], code: int) -> str:
    """What Volcano does with a pod that has failed with a code."""
    fits = (each for each in policies if each.get("event") == "PodFailed" or each.get("exitCode") == code)
    return next(fits, {"action": "SyncJob"})["action"]


def of_an_ascendjob(top: dict[str, Any], decided: dict[str, Any]) -> Iterator[str]:
    """What is wrong with an AscendJob: what its operator refuses, and how pods are told apart."""
    spec, replicas = top["spec"], top["spec"]["replicaSpecs"]
    if set(replicas) != ({"Master", "Worker"} if decided["nodes"] > 1 else {"Master"}):
        yield "not a master and workers"
    if replicas["Master"]["replicas"] != 1 or 0 in {each["replicas"] for each in replicas.values()}:
        yield "not one master, or workers that are none"
    if top["metadata"]["labels"].get("framework") != "pytorch":
        yield "the operator does not know the framework"
    if spec["runPolicy"]["schedulingPolicy"]["minAvailable"] != decided["nodes"]:
        yield "some pods start without the others"
    if not spec["runPolicy"]["schedulingPolicy"].get("queue") or spec["schedulerName"] != "volcano":
        yield "the operator finds no queue"
    for replica in replicas.values():
        (container,) = replica["template"]["spec"]["containers"]
        if container["name"] != "ascend":
            yield "the operator finds no container"
        if container["ports"] != [{"name": "ascendjob-port", "containerPort": 2222}]:
            yield "the master has no port"
        if not any(name.startswith("huawei.com/") for name in container["resources"]["requests"]):
            yield "a pod asks for no NPU"
        if container["args"][2:]:
            yield "the container is told twice which node it is"
        ring = "ring-controller.atlas"
        if replica["template"]["metadata"]["labels"].get(ring) != top["metadata"]["labels"][ring]:
            yield "pods are not of the job's chip"
        if replica["restartPolicy"] != "Never":
            yield "retries need pods that are never restarted"


def of_a_rayjob(top: dict[str, Any], decided: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a RayJob: what its operator starts, and what Ray makes of that."""
    spec, name = top["spec"], top["metadata"]["name"]
    ray = spec["rayClusterSpec"]
    head, (group,) = ray["headGroupSpec"], ray["workerGroupSpecs"]
    (container,) = head["template"]["spec"]["containers"]
    words = shlex.split(spec["entrypoint"])
    if words[:2] != ["env", f"--chdir={container['workingDir']}"] or set("&|;") & set(spec["entrypoint"]):
        yield "the submitter's shell takes the driver's words for its own"
    if words[2:6] != ["mcore-bundle", "launch", "ray", f"--job={mounted(container)['job']}/job.json"]:
        yield "the job file is not where the driver is told"
    if not group["minReplicas"] == group["maxReplicas"] == group["replicas"]:
        yield "a node is not always there"
    if head["rayStartParams"]["num-cpus"] != "0" or group["rayStartParams"]["num-cpus"] != "1":
        yield "a node may be on the head, or two on one worker"
    start = group["rayStartParams"]
    known = {"cuda": int(start.get("num-gpus", 0)), "cpu": 0}
    if "resources" in start:
        (text,) = shlex.split(start["resources"])
        known["ascend"] = json.loads(text)["NPU"]
    if known.get(decided["backend"], -1) != (0 if decided["backend"] == "cpu" else decided["per_node"]):
        yield "Ray does not know the devices of a worker"
    labels = [each["metadata"]["labels"] for each in (head["template"], group["template"])]
    found = spec["submitterPodTemplate"]["metadata"]["labels"].get("app.kubernetes.io/instance")
    if found != name or any("app.kubernetes.io/instance" in each for each in labels):
        yield "what the job writes is not what its pods write"
    (submitter,) = spec["submitterPodTemplate"]["spec"]["containers"]
    if any("args" in each for each in (submitter, container, group["template"]["spec"]["containers"][0])):
        yield "the operator runs our words behind its own"
    if (head["serviceType"], head["enableIngress"], ray["authOptions"]) != (
        "ClusterIP",
        False,
        {"mode": "token"},
    ):
        yield "the dashboard is open to others"
    waits = ["flock", f"{container['workingDir']}/{decided['directory']}/.lock", "true"]
    for template in (head["template"], group["template"]):
        if template["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] != waits:
            yield "a pod goes before the job has saved"
    variable = container["env"][-1]
    if variable["name"] != "RAY_JOB_STOP_WAIT_TIME_S" or int(variable["value"]) < 300:
        yield "Ray kills the driver while its nodes save"
    if not spec["shutdownAfterJobFinishes"]:
        yield "devices are kept after the end"


def test_the_objects_fit_each_other(jobs):
    for job in jobs:
        for options in options_of(job):
            assert list(disagreements(kubernetes.build_objects(job, options))) == [], options.form


def container(objects: Objects) -> Any:
    return pods(objects)[0][1]["spec"]["containers"][0]


def inner_set(objects: Objects) -> Any:
    return objects[-2]["spec"]["template"]["spec"]


def cluster(objects: Objects) -> Any:
    return objects[-1]["spec"]["rayClusterSpec"]


def workers(objects: Objects) -> Any:
    (group,) = cluster(objects)["workerGroupSpecs"]
    return group


BREAKING: list[tuple[str, str, Callable[[Objects], Any]]] = [
    ("job", "headless", lambda o: o[-1]["spec"]["template"]["spec"].update(subdomain="other")),
    ("job", "does not select", lambda o: o[1]["spec"].update(selector={"app": "x"})),
    ("job", "no names before", lambda o: o[1]["spec"].pop("publishNotReadyAddresses")),
    ("job", "rendezvous", lambda o: o[-1]["metadata"].update(name="other")),
    ("job", "as many pods", lambda o: o[-1]["spec"].update(completions=1)),
    ("job", "all pods at once", lambda o: o[-1]["spec"].update(parallelism=1)),
    ("job", "replaced alone", lambda o: o[-1]["spec"].update(backoffLimit=3)),
    ("job", "restarted alone", lambda o: pods(o)[0][1]["spec"].update(restartPolicy="OnFailure")),
    ("job", "about no container", lambda o: container(o).update(name="main")),
    ("job", "no restart mends",
     lambda o: indexed(o)["podFailurePolicy"]["rules"][0]["onExitCodes"].update(values=[1])),
    ("job", "nobody can name", lambda o: container(o)["env"].clear()),
    ("job", "no volume", lambda o: pods(o)[0][1]["spec"]["volumes"].pop()),
    ("job", "ConfigMap", lambda o: o[0]["metadata"].update(name="old")),
    ("job", "where the pod is told", lambda o: container(o)["args"].__setitem__(1, "--job=/job.json")),
    ("job", "evicted", lambda o: container(o)["resources"]["limits"].update(cpu="1")),
    ("job", "does not know", lambda o: container(o)["resources"]["requests"].pop("cpu")),
    ("job", "as many devices", lambda o: container(o)["resources"]["limits"].pop("huawei.com/Ascend910")),
    ("job", "namespace", lambda o: o[0]["metadata"].update(namespace="other")),
    ("jobset", "restarts the set", lambda o: o[-1]["spec"]["failurePolicy"]["rules"][0].update(action="X")),
    ("jobset", "no names before", lambda o: o[-1]["spec"]["network"].update(enableDNSHostnames=False)),
    ("jobset", "rendezvous", lambda o: o[-1]["spec"]["network"].update(subdomain="x")),
    ("trainjob", "another runtime", lambda o: o[-1]["spec"]["runtimeRef"].update(name="x")),
    ("trainjob", "that trains",
     lambda o: inner_set(o)["replicatedJobs"][0]["template"]["metadata"]["labels"].clear()),
    ("trainjob", "first pod", lambda o: inner_set(o)["network"].update(subdomain="x")),
    ("trainjob", "not told", lambda o: o[-1]["spec"]["trainer"].update(numProcPerNode=1)),
    ("trainjob", "told twice", lambda o: o[-1]["spec"]["trainer"]["args"].append("--nodes=2")),
    ("volcano", "without the others", lambda o: o[-1]["spec"].update(minAvailable=1)),
    ("volcano", "their index", lambda o: o[-1]["spec"]["plugins"].pop("env")),
    ("volcano", "no restart mends", lambda o: o[-1]["spec"]["policies"].reverse()),
    ("volcano", "does not restart", lambda o: o[-1]["spec"]["policies"].pop(3)),
    ("volcano", "no device", lambda o: container(o)["env"].pop()),
    ("volcano", "rendezvous",
     lambda o: o[-1]["spec"]["tasks"][0].update(name="x") or container(o)["args"].pop()),
    ("rayjob", "its own", lambda o: o[-1]["spec"].update(entrypoint="cd / && mcore-bundle launch ray")),
    ("rayjob", "where the driver is told",
     lambda o: o[-1]["spec"].update(entrypoint=o[-1]["spec"]["entrypoint"].replace("/opt/job", "/job"))),
    ("rayjob", "always there", lambda o: workers(o).update(minReplicas=0)),
    ("rayjob", "on the head", lambda o: cluster(o)["headGroupSpec"]["rayStartParams"].pop("num-gpus")
     and cluster(o)["headGroupSpec"]["rayStartParams"].update({"num-cpus": "8"})),
    ("rayjob", "know the devices", lambda o: workers(o)["rayStartParams"].pop("resources")),
    ("rayjob", "writes", lambda o: o[-1]["spec"]["submitterPodTemplate"]["metadata"].update(labels={})),
    ("rayjob", "behind its own", lambda o: container(o).update(args=["train"])),
    ("rayjob", "open to others", lambda o: cluster(o)["headGroupSpec"].update(serviceType="LoadBalancer")),
    ("rayjob", "before the job has saved",
     lambda o: container(o)["lifecycle"]["preStop"]["exec"].update(command=["true"])),
    ("rayjob", "kills the driver", lambda o: cluster(o)["headGroupSpec"]["template"]["spec"]["containers"][0]
     .update(env=[{"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": "3"}])),
    ("rayjob", "after the end", lambda o: o[-1]["spec"].update(shutdownAfterJobFinishes=False)),
    ("ascendjob", "a master and workers", lambda o: o[-1]["spec"]["replicaSpecs"].pop("Worker")),
    ("ascendjob", "not one master", lambda o: o[-1]["spec"]["replicaSpecs"]["Master"].update(replicas=2)),
    ("ascendjob", "framework", lambda o: o[-1]["metadata"]["labels"].pop("framework")),
    ("ascendjob", "no queue", lambda o: o[-1]["spec"]["runPolicy"]["schedulingPolicy"].pop("queue")),
    ("ascendjob", "without the others",
     lambda o: o[-1]["spec"]["runPolicy"]["schedulingPolicy"].update(minAvailable=1)),
    ("ascendjob", "no container", lambda o: container(o).update(name="node")),
    ("ascendjob", "no port", lambda o: container(o).update(ports=[])),
    ("ascendjob", "no NPU", lambda o: container(o).update(resources={"limits": {}, "requests": {}})),
    ("ascendjob", "told twice", lambda o: container(o)["args"].append("--nodes=2")),
    ("ascendjob", "chip", lambda o: pods(o)[1][1]["metadata"].update(labels={})),
    ("ascendjob", "never restarted",
     lambda o: o[-1]["spec"]["replicaSpecs"]["Worker"].update(restartPolicy="Always")),
]  # fmt: skip


@pytest.mark.parametrize(("form", "said", "breaks"), BREAKING)
def test_each_disagreement_is_noticed(npus, form, said, breaks):
    objects = copy.deepcopy(kubernetes.build_objects(npus, everything(form)))
    breaks(objects)
    assert any(said in line for line in disagreements(objects))
