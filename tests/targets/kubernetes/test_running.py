"""Jobs on a cluster, as far as a recorder can be one: what is asked when, and what is made of answers.

`KUBECONFIG=... BUNDLE_IMAGE=... BUNDLE_CLAIM=... make clusters` is the same against a real one.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bundle.errors import ExitCode, LaunchUnavailable, UsageError
from bundle.launch.job import of_plan
from bundle.planning import plan_for
from bundle.recipe import load
from bundle.targets.kubernetes import FORMS, client, running
from bundle.targets.kubernetes.options import Options
from tests.targets.kubernetes.jobs import LEAST
from tests.targets.kubernetes.recorder import Recorder, listening, pod

JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/research/jobsets"
DONE = {"conditions": [{"type": "Completed", "status": "True"}]}
BROKEN = {"conditions": [{"type": "Failed", "status": "True", "message": "a pod failed"}]}
NAME = "jobset/research/demo"


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    pytest.importorskip("kubernetes")
    recorder = Recorder()
    with listening(recorder) as address:
        configuration = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "contexts": [
                {"name": "here", "context": {"cluster": "here", "user": "me", "namespace": "research"}}
            ],
            "clusters": [{"name": "here", "cluster": {"server": address}}],
            "users": [{"name": "me", "user": {}}],
        }
        (tmp_path / "config").write_text(json.dumps(configuration))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        client._cluster.cache_clear()
        yield recorder
    client._cluster.cache_clear()


def test_everything_is_tried_before_anything_is_made_and_goes_with_the_workload(recorder, small):
    assert running.submit(small, LEAST) == NAME
    posts = [each for each in recorder.requests if each.method == "POST"]
    tried, made = posts[:2], recorder.made()
    assert [each.query["dryRun"] for each in tried] == ["All", "All"]
    assert {each.query["fieldValidation"] for each in posts} == {"Strict"}
    assert [each.path for each in made] == [JOBSETS, "/api/v1/namespaces/research/configmaps"]
    workload, file = (recorder.objects[f"{each.path}/{each.body['metadata']['name']}"] for each in made)
    (owner,) = file["metadata"]["ownerReferences"]
    assert owner == {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "name": "demo",
        "uid": workload["metadata"]["uid"],
    }
    assert json.loads(file["data"]["job.json"])["digest"] == small.dump()["digest"]


def test_a_runtime_is_made_before_the_trainjob_that_names_it_is_tried(recorder, small):
    running.submit(small, replace(LEAST, form="trainjob"))
    posts = [each for each in recorder.requests if each.method == "POST"]
    kinds = [(each.body["kind"], "dryRun" in each.query) for each in posts]
    assert kinds == [
        ("ClusterTrainingRuntime", True),
        ("ClusterTrainingRuntime", False),
        ("ConfigMap", True),
        ("TrainJob", True),
        ("TrainJob", False),
        ("ConfigMap", False),
    ]
    assert recorder.made()[0].path == "/apis/trainer.kubeflow.org/v1alpha1/clustertrainingruntimes"


def test_what_the_cluster_refuses_is_said_all_at_once_and_nothing_is_made(recorder, small):
    recorder.refusals = {"/jobs": (422, "spec.x: Invalid value"), "/services": (403, "services is forbidden")}
    with pytest.raises(LaunchUnavailable) as refused:
        running.submit(small, replace(LEAST, form="job"))
    assert "Job: spec.x: Invalid value" in str(refused.value)
    assert "Service: services is forbidden" in str(refused.value)
    assert recorder.made() == []


def test_a_form_that_is_not_installed_is_named(recorder, small):
    recorder.refusals = {"/jobsets": (404, "the server could not find the requested resource")}
    with pytest.raises(LaunchUnavailable, match=r"JobSet of jobset.x-k8s.io/v1alpha2: is not installed"):
        running.submit(small, LEAST)


def test_a_job_that_runs_is_not_begun_again_and_one_that_has_ended_is(recorder, small):
    running.submit(small, LEAST)
    with pytest.raises(LaunchUnavailable, match="has not ended"):
        running.submit(small, LEAST)
    first = recorder.objects[f"{JOBSETS}/demo"]["metadata"]["uid"]
    recorder.statuses = [BROKEN]
    running.submit(small, LEAST)
    (gone,) = (each for each in recorder.requests if each.method == "DELETE")
    assert gone.path == f"{JOBSETS}/demo" and gone.query["propagationPolicy"] == "Foreground"
    second = recorder.objects[f"{JOBSETS}/demo"]["metadata"]["uid"]
    assert first != second
    # The job file of the same job is there already, and now goes with the second.
    (file,) = (each for path, each in recorder.objects.items() if "configmaps" in path)
    assert [each["uid"] for each in file["metadata"]["ownerReferences"]] == [second]


DRIVER = "the driver failed with exit code 75, logs:\nfailed with exit code 9"
ENDS = [
    ("jobset", DONE, ("COMPLETED", "", 0)),
    ("jobset", BROKEN, ("FAILED", "a pod failed", 4)),
    ("job", {"conditions": [{"type": "Complete", "status": "True"}]}, ("COMPLETED", "", 0)),
    ("job", {"conditions": [{"type": "FailureTarget", "status": "True"}]}, ("PENDING", "no room", None)),
    ("trainjob", {"conditions": [{"type": "Complete", "status": "True"}]}, ("COMPLETED", "", 0)),
    ("trainjob", {"conditions": [{"type": "Failed", "status": "True"}]}, ("FAILED", "", 4)),
    ("volcano", {"state": {"phase": "Completed"}}, ("COMPLETED", "", 0)),
    ("volcano", {"state": {"phase": "Terminated", "message": "by a policy"}}, ("FAILED", "by a policy", 4)),
    ("volcano", {"state": {"phase": "Restarting"}}, ("PENDING", "no room", None)),
    ("rayjob", {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}, ("COMPLETED", "", 0)),
    ("rayjob", {"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED"}, ("FAILED", "stopped", 143)),
    ("rayjob", {"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "message": DRIVER},
     ("FAILED", "the driver failed with exit code 75, logs:", 75)),
    ("rayjob", {"jobDeploymentStatus": "Failed", "reason": "SubmissionFailed"},
     ("FAILED", "SubmissionFailed", 4)),
    ("rayjob", {"jobDeploymentStatus": "ValidationFailed", "message": "spec.x: no"},
     ("FAILED", "spec.x: no", 4)),
    ("rayjob", {"jobDeploymentStatus": "Retrying"}, ("PENDING", "no room", None)),
    ("ascendjob", {"conditions": [{"type": "Succeeded", "status": "True"}]}, ("COMPLETED", "", 0)),
    ("ascendjob", {"conditions": [{"type": "Failed", "status": "False"}]}, ("PENDING", "no room", None)),
]  # fmt: skip


@pytest.mark.parametrize(("form", "status", "found"), ENDS)
def test_a_status_says_how_a_job_is(recorder, small, npus, form, status, found):
    name = running.submit(npus if form == "ascendjob" else small, replace(LEAST, form=form))
    recorder.statuses = [status]
    recorder.pods = [
        [
            pod("demo-node-0-2", "Failed", 1, "2026-01-01T00:00:09Z"),
            pod("demo-node-0-0", "Failed", 4, "2026-01-01T00:00:08Z"),
            pod("demo-node-0-1", "Succeeded", 0, "2026-01-01T00:00:01Z"),
            pod("demo-node-0-3", "Pending", waits="no room"),
        ]
    ]
    assert running.state(name) == found
    asked = [each.query for each in recorder.requests if each.path.endswith("/pods")]
    assert all(query["labelSelector"] == "app.kubernetes.io/instance=demo" for query in asked)


def test_a_job_runs_when_all_of_its_pods_do(recorder, small):
    running.submit(small, LEAST)
    recorder.pods = [[pod("demo-node-0-0", "Running"), pod("demo-node-0-1", "Running")]]
    assert running.state(NAME) == ("RUNNING", "", None)
    recorder.objects[f"{JOBSETS}/demo"]["spec"]["suspend"] = True
    recorder.statuses = [{"conditions": [{"type": "Suspended", "status": "True", "message": "by Kueue"}]}]
    assert running.state(NAME) == ("SUSPENDED", "by Kueue", None)
    recorder.objects[f"{JOBSETS}/demo"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert running.state(NAME)[0] == "STOPPING"


def test_what_pods_write_is_shown_once_also_of_those_that_a_restart_made(recorder, small):
    running.submit(small, LEAST)
    recorder.statuses = [{}, {}, {}, DONE]
    recorder.logs = {"demo-0": "one\n", "demo-1": "two\n", "demo-0-again": "three\n"}
    begun = [pod("demo-0", "Running"), pod("demo-1", "Pending")]
    recorder.pods = [begun, begun, [pod("demo-0-again", "Running"), pod("demo-1", "Running")]]
    assert sorted(running.follow(NAME, seconds=0.05)) == ["one\n", "three\n", "two\n"]
    assert running.wait(NAME, seconds=0.05) == 0
    recorder.pods = [[pod("demo-1", "Succeeded", 0), pod("demo-0", "Succeeded", 0)]]
    assert running.written(NAME) == "one\ntwo\n"


def test_a_job_that_is_stopped_goes_and_who_waits_for_it_is_told(recorder, small):
    running.submit(small, LEAST)
    waiting = running._looked_at(NAME, seconds=0.05)
    assert next(waiting).code is None
    running.stop(NAME)
    assert next(waiting) == ("STOPPED", "its objects are gone", int(ExitCode.TERMINATED))
    for verb in (running.state, running.wait, running.stop):
        with pytest.raises(LaunchUnavailable, match=r"no such job|not found"):
            verb(NAME)


def test_where_no_server_answers_that_is_said(recorder, tmp_path, small):
    file = tmp_path / "config"
    file.write_text(file.read_text().replace("http://127.0.0.1:", "http://127.0.0.1:1/x"))
    with pytest.raises(LaunchUnavailable, match="no API server answers"):
        running.submit(small, LEAST)


def test_where_no_cluster_is_configured_that_is_said(recorder, monkeypatch, tmp_path, small):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(LaunchUnavailable, match="no cluster is configured"):
        running.submit(small, LEAST)


def test_a_job_that_cannot_be_written_is_refused_before_anybody_is_asked(recorder, small):
    with pytest.raises(UsageError, match="--claim"):
        running.submit(small, replace(LEAST, claim=""))
    assert recorder.requests == []


def test_the_verb_prints_the_handle_alone_by_which_the_job_is_asked_about(recorder):
    def launch(*words: str) -> str:
        command = [sys.executable, "-m", "bundle", "launch", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    asked = ("demo", "--nodes=2", "--devices-per-node=1", "--hardware=cpu", "--claim=runs")
    image = ("--image=bundle", "--image-record=none")
    handle = launch("kubernetes", *asked, *image, "--apply", "--detach")
    assert handle == f"kubernetes:{NAME}\n"
    recorder.pods = [[pod("demo-node-0-0", "Pending", waits="0/3 nodes are available")]]
    assert launch("status", handle.strip()) == f"kubernetes:{NAME} PENDING (0/3 nodes are available)\n"


@pytest.mark.clusters
@pytest.mark.parametrize("form", [form for form in FORMS if form != "ascendjob"])
def test_a_real_cluster_trains_the_demo(form):
    pytest.importorskip("kubernetes")
    image, claim = os.environ.get("BUNDLE_IMAGE"), os.environ.get("BUNDLE_CLAIM")
    if not (os.environ.get("KUBECONFIG") and image and claim):
        pytest.skip("a cluster is named by KUBECONFIG, BUNDLE_IMAGE (none of ours) and BUNDLE_CLAIM")
    plan = plan_for(load("demo", ("train.steps=2",)), backend="cpu", named="cpu", nodes=2, per_node=1)
    job = of_plan(plan, Path(f"runs/demo-{form}"))
    name = running.submit(job, Options(image, claim, name=f"demo-{form}", form=form, shared_memory="1Gi"))
    try:
        shown = "".join(running.follow(name))
        assert running.wait(name) == 0, shown
        assert "step" in shown
    finally:
        running.stop(name)
