"""Jobs on a cluster, as far as a recorder can be one: what is asked when, and what is made of answers.

`KUBECONFIG=... BUNDLE_IMAGE=... BUNDLE_CLAIM=... make clusters` is the same against a real one.
"""

import copy
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bundle.errors import ExitCode, TargetUnavailable, UsageError
from bundle.launch.job import from_plan
from bundle.planning import build_plan
from bundle.recipe import load
from bundle.targets.kubernetes import FORMS_BY_NAME, client, jobs, logs
from bundle.targets.kubernetes.options import KubernetesOptions
from bundle.targets.states import JobState, ListedJob
from tests.command import run_bundle
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
        client._connect.cache_clear()
        yield recorder
    client._connect.cache_clear()


def test_everything_is_tried_before_anything_is_made_and_goes_with_the_workload(recorder, small):
    assert jobs.submit(small, LEAST) == NAME
    posts = [each for each in recorder.requests if each.method == "POST"]
    tried, made = posts[:2], recorder.made()[::-1]
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


def test_the_jobs_of_the_namespace_are_listed_and_no_others(recorder, small, caplog):
    for form in ("jobset", "trainjob"):
        jobs.submit(small, replace(LEAST, form=form))
    made = dict(recorder.objects)
    for path, made_object in made.items():  # somebody else's, and a child of ours with our labels
        foreign, child = copy.deepcopy(made_object), copy.deepcopy(made_object)
        foreign["metadata"]["labels"] = {"app.kubernetes.io/instance": "demo"}
        child["metadata"] |= {"name": "demo-node-0"}
        recorder.objects |= {f"{path}-foreign": foreign, f"{path}-node-0": child}
    recorder.objects[f"{JOBSETS}/demo"]["status"] = DONE
    recorder.pods = [[pod("demo-node-0-0", "Running")]]
    recorder.unlisted = {"rayjobs": (403, "may not list rayjobs"), "ascendjobs": (404, "no such kind")}
    assert list(jobs.list_jobs()) == [
        ListedJob(NAME, "COMPLETED", True, small.directory),
        ListedJob("trainjob/research/demo", "RUNNING", False, small.directory),
    ]
    (warning,) = (record.getMessage() for record in caplog.records)
    assert "rayjob" in warning and "may not list rayjobs" in warning


def test_without_an_answer_of_the_server_nothing_is_listed(recorder, small):
    recorder.lost = {("GET", "/jobsets"): (10, False)}
    with pytest.raises(client.ServerUnreachable):
        list(jobs.list_jobs())


def test_a_runtime_is_made_before_the_trainjob_that_names_it_is_tried(recorder, small):
    jobs.submit(small, replace(LEAST, form="trainjob"))
    posts = [each for each in recorder.requests if each.method == "POST"]
    kinds = [(each.body["kind"], "dryRun" in each.query) for each in posts]
    assert kinds == [
        ("TrainingRuntime", True),
        ("TrainingRuntime", False),
        ("ConfigMap", True),
        ("TrainJob", True),
        ("ConfigMap", False),
        ("TrainJob", False),
    ]
    assert (
        recorder.made()[0].path == "/apis/trainer.kubeflow.org/v1alpha1/namespaces/research/trainingruntimes"
    )


def test_what_the_cluster_refuses_is_said_all_at_once_and_nothing_is_made(recorder, small, messages):
    recorder.refusals = {"/jobs": (422, "spec.x: Invalid value"), "/services": (403, "services is forbidden")}
    with pytest.raises(TargetUnavailable) as refused:
        jobs.submit(small, replace(LEAST, form="job"))
    assert "Job: spec.x" in str(refused.value) and "Service: services" in str(refused.value)
    assert recorder.made() == []
    messages(refused.value)


def test_a_form_that_is_not_installed_is_named(recorder, small, messages):
    recorder.refusals = {"/jobsets": (404, "the server could not find the requested resource")}
    with pytest.raises(TargetUnavailable, match="JobSet") as refused:
        jobs.submit(small, LEAST)
    messages(refused.value)


def test_a_job_that_runs_is_not_begun_again_and_one_that_has_ended_is(recorder, small, messages):
    jobs.submit(small, LEAST)
    with pytest.raises(TargetUnavailable, match=NAME) as refused:
        jobs.submit(small, LEAST)
    messages(refused.value)
    first = recorder.objects[f"{JOBSETS}/demo"]["metadata"]["uid"]
    recorder.statuses = [BROKEN]
    jobs.submit(small, LEAST)
    (gone,) = (each for each in recorder.requests if each.method == "DELETE")
    assert gone.path == f"{JOBSETS}/demo" and gone.body["propagationPolicy"] == "Foreground"
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
    name = jobs.submit(npus if form == "ascendjob" else small, replace(LEAST, form=form))
    recorder.statuses = [status]
    recorder.pods = [
        [
            pod("demo-node-0-2", "Failed", 1, "2026-01-01T00:00:09Z"),
            pod("demo-node-0-0", "Failed", 4, "2026-01-01T00:00:08Z"),
            pod("demo-node-0-1", "Succeeded", 0, "2026-01-01T00:00:01Z"),
            pod("demo-node-0-3", "Pending", waits="no room"),
        ]
    ]
    assert jobs.query_state(name) == JobState(*found)
    asked = [each.query for each in recorder.requests if each.path.endswith("/pods")]
    assert all(query["labelSelector"].endswith("/instance=demo") for query in asked)


def test_a_preempted_pod_that_was_replaced_says_nothing_of_the_job(recorder, small):
    name = jobs.submit(small, replace(LEAST, form="job"))
    drained = [pod(f"demo-{index}-old", "Failed", 75, f"2026-01-01T00:00:0{index}Z") for index in (0, 1)]
    recorder.pods = [[*drained, pod("demo-0-new", "Running"), pod("demo-1-new", "Running")]]
    assert jobs.query_state(name).name == "RUNNING"
    recorder.statuses = [
        {"conditions": [{"type": "Failed", "status": "True", "message": "PodFailurePolicy"}]}
    ]
    recorder.pods = [[*drained, pod("demo-0-new", "Failed", 3, "2026-01-01T01:00:00Z")]]
    assert jobs.query_state(name) == JobState("FAILED", "PodFailurePolicy", 3)
    recorder.pods = [drained]
    assert jobs.wait(name) == 75


def test_a_job_runs_when_all_of_its_pods_do(recorder, small):
    jobs.submit(small, LEAST)
    recorder.pods = [[pod("demo-node-0-0", "Running"), pod("demo-node-0-1", "Running")]]
    assert jobs.query_state(NAME) == JobState("RUNNING", "", None)
    recorder.objects[f"{JOBSETS}/demo"]["spec"]["suspend"] = True
    recorder.statuses = [{"conditions": [{"type": "Suspended", "status": "True", "message": "by Kueue"}]}]
    assert jobs.query_state(NAME) == JobState("SUSPENDED", "by Kueue", None)
    recorder.objects[f"{JOBSETS}/demo"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert jobs.query_state(NAME)[0] == "STOPPING"


def test_what_pods_write_is_shown_once_also_of_those_that_a_restart_made(recorder, small):
    jobs.submit(small, LEAST)
    recorder.statuses = [{}, {}, {}, DONE]
    recorder.logs = {"demo-0": ["one\n"], "demo-1": ["two\n"], "demo-0-again": ["three\n"]}
    begun = [pod("demo-0", "Running"), pod("demo-1", "Pending")]
    recorder.pods = [begun, begun, [pod("demo-0-again", "Running"), pod("demo-1", "Running")]]
    before = time.monotonic()
    assert sorted(jobs.follow(NAME, seconds=0.05)) == ["one\n", "three\n", "two\n"]
    assert time.monotonic() - before < client.TIMEOUT_SECONDS / 2  # pods that are said to run write no more
    assert jobs.wait(NAME, seconds=0.05) == 0
    recorder.pods = [[pod("demo-1", "Succeeded", 0), pod("demo-0", "Succeeded", 0)]]
    assert jobs.read_log(NAME) == "one\ntwo\n"


@pytest.mark.parametrize("tick", [1.0, 0.25, 0.0])
def test_a_stream_that_was_cut_goes_on_where_it_was_and_ends_with_the_last_line(recorder, small, tick):
    jobs.submit(small, LEAST)
    lines = [f"line {number} of the pod\n" for number in range(90)]
    recorder.tick = tick
    recorder.statuses = [*[{}] * 8, DONE]
    # The server cuts answers in a line, in its time, at once; ends others, in a line, too; the last are late.
    parts = ["".join(lines[:30])] * 2 + ["".join(lines[:60])[:-3]] * 3 + ["".join(lines)]
    recorder.logs = {"demo-0": parts}
    recorder.cuts = {"demo-0": [0, 411, 1500, 10**6, 7]}
    runs, ended = pod("demo-0", "Running"), pod("demo-0", "Succeeded", 0)
    recorder.pods = [*[[runs]] * 7, [ended]]
    assert list(jobs.follow(NAME, seconds=0.05)) == lines
    asked = [each.query for each in recorder.requests if each.path.endswith("/log")]
    assert len(asked) > 5 and "sinceSeconds" not in asked[0]
    # From a minute before the last line that came, of those that began ten minutes ago.
    assert 659 - 89 * tick <= int(asked[-1]["sinceSeconds"]) <= 660 + 30


def test_a_stream_that_is_lost_before_it_begins_is_asked_for_anew(recorder, small, monkeypatch):
    jobs.submit(small, LEAST)
    recorder.statuses = [*[{}] * 5, DONE]
    recorder.logs = {"demo-0": ["one\n"]}
    recorder.pods = [[pod("demo-0", "Running")]]
    recorder.lost = {("GET", "/log"): (2, False)}
    asked = []

    def stream(*words, stream=client.stream_timestamped_log):
        asked.append(words)
        return stream(*words)

    monkeypatch.setattr(client, "stream_timestamped_log", stream)
    assert list(jobs.follow(NAME, seconds=0.05)) == ["one\n"]
    assert len(asked) == len([each for each in recorder.requests if each.path.endswith("/log")]) > 2


def test_who_follows_goes_on_where_the_server_is_away_for_a_moment(recorder, small):
    jobs.submit(small, LEAST)
    recorder.statuses = [*[{}] * 5, DONE]
    recorder.logs = {"demo-0": ["one\n"]}
    recorder.pods = [[pod("demo-0", "Succeeded", 0)]]
    recorder.lost = {("GET", "/pods"): (4, False)}  # the client itself asks four times
    assert list(jobs.follow(NAME, seconds=0.05)) == ["one\n"]


def test_what_a_pod_wrote_between_a_cut_and_its_end_is_shown(recorder, small):
    jobs.submit(small, LEAST)
    recorder.statuses = [{}, BROKEN]
    recorder.logs = {"demo-0": ["one\n", "one\nthe verdict\nhalf a line"]}
    recorder.pods = [[pod("demo-0", "Running")], [pod("demo-0", "Failed", 4)]]
    assert list(jobs.follow(NAME, seconds=0.05)) == ["one\n", "the verdict\n", "half a line"]


def test_the_pods_beyond_those_that_are_streamed_at_once_are_shown_too(recorder, small, monkeypatch):
    monkeypatch.setattr(logs, "MOST_STREAMS", 2)
    jobs.submit(small, LEAST)
    recorder.statuses = [DONE]
    recorder.logs = {f"demo-{number}": [f"{number}\n"] for number in range(5)}
    recorder.pods = [[pod(f"demo-{number}", "Succeeded", 0) for number in range(5)]]
    assert sorted(jobs.follow(NAME, seconds=0.05)) == [f"{number}\n" for number in range(5)]


def test_streams_that_never_end_are_waited_for_together(recorder, small, monkeypatch):
    jobs.submit(small, LEAST)
    recorder.statuses = [DONE]
    recorder.pods = [[pod(f"demo-{number}", "Running") for number in range(3)]]
    monkeypatch.setattr(client, "TIMEOUT_SECONDS", 1)
    goes_on = threading.Event()

    def stream(*_: object) -> Iterator[str]:
        goes_on.wait(60)
        yield from ()

    monkeypatch.setattr(client, "stream_timestamped_log", stream)
    before = time.monotonic()
    assert list(jobs.follow(NAME, seconds=0.05)) == []
    assert time.monotonic() - before < 2.5
    goes_on.set()


FOREIGN = {"metadata": {"name": "demo", "uid": "theirs", "resourceVersion": "1", "labels": {"app": "web"}}}
OWNER = {"apiVersion": "v1", "kind": "Web", "name": "web", "uid": "theirs"}
THEIRS = [
    {},
    {"labels": {}},
    {"labels": {"app.kubernetes.io/managed-by": "mcore-bundle"}},
    {"labels": {"app.kubernetes.io/instance": "demo"}},
    {"labels": {"app.kubernetes.io/managed-by": "mcore-bundle", "app.kubernetes.io/instance": "other"}},
    {"labels": {"app.kubernetes.io/managed-by": "Helm", "app.kubernetes.io/instance": "demo"}},
]


@pytest.mark.parametrize("labels", THEIRS)
def test_a_workload_of_somebody_else_is_neither_replaced_nor_stopped(recorder, small, labels, messages):
    theirs = {"metadata": FOREIGN["metadata"] | labels}
    recorder.objects = {f"{JOBSETS}/demo": copy.deepcopy(theirs)}
    recorder.statuses = [DONE]
    for touch in (lambda: jobs.submit(small, LEAST), lambda: jobs.request_stop(NAME)):
        with pytest.raises(TargetUnavailable, match=f"kubernetes:{NAME}") as refused:
            touch()
        messages(refused.value)
    assert {each.method for each in recorder.requests} == {"GET"}
    assert recorder.objects == {f"{JOBSETS}/demo": theirs}


@pytest.mark.parametrize("labels", THEIRS)
def test_a_service_of_somebody_else_is_left_alone_and_refused(recorder, small, labels, messages):
    path = "/api/v1/namespaces/research/services/demo"
    theirs = {"metadata": FOREIGN["metadata"] | labels | {"ownerReferences": [OWNER]}}
    theirs |= {"apiVersion": "v1", "kind": "Service"}
    recorder.objects = {path: copy.deepcopy(theirs)}
    with pytest.raises(TargetUnavailable, match="Service demo") as refused:
        jobs.submit(small, replace(LEAST, form="job"))
    messages(refused.value)
    assert recorder.objects == {path: theirs} and recorder.made() == []


def test_what_two_jobs_need_goes_with_the_last_of_them(recorder, small):
    jobs.submit(small, LEAST)
    jobs.submit(small, replace(LEAST, form="volcano"))
    (file,) = (each for path, each in recorder.objects.items() if "configmaps" in path)
    assert [each["kind"] for each in file["metadata"]["ownerReferences"]] == ["JobSet", "Job"]


def test_pods_find_what_they_need_and_nothing_is_left_of_a_workload_that_is_refused(recorder, small):
    jobs.submit(small, replace(LEAST, form="job"))
    assert [each.body["kind"] for each in recorder.made()] == ["ConfigMap", "Service", "Job"]
    for form, end in (("jobset", "/jobsets"), ("trainjob", "/trainjobs")):
        recorder.objects.clear()
        recorder.late = {end: (403, "exceeded quota")}
        with pytest.raises(TargetUnavailable, match="exceeded quota"):
            jobs.submit(small, replace(LEAST, form=form))
        assert recorder.objects == {}
    recorder.late, recorder.refusals = {}, {"/trainjobs": (422, "spec.x: Invalid value")}
    with pytest.raises(TargetUnavailable, match="Invalid value"):
        jobs.submit(small, replace(LEAST, form="trainjob"))
    assert recorder.objects == {}  # the runtime, too, which was made to try the TrainJob


def test_what_was_there_before_stays_when_the_workload_is_refused(recorder, small):
    jobs.submit(small, replace(LEAST, form="volcano"))
    before = copy.deepcopy(recorder.objects)
    recorder.late = {"/jobsets": (403, "exceeded quota")}
    with pytest.raises(TargetUnavailable, match="exceeded quota"):
        jobs.submit(small, LEAST)
    assert recorder.objects == before


def test_what_has_changed_since_it_was_made_or_found_is_left(recorder, small, monkeypatch, caplog, messages):
    def make(each, make=client.create_if_absent):
        for there in recorder.objects.values():
            there["metadata"]["resourceVersion"] = "of somebody else"
        return make(each)

    recorder.late = {"/jobsets": (403, "exceeded quota")}
    with monkeypatch.context() as patched, pytest.raises(TargetUnavailable, match="exceeded quota"):
        patched.setattr(client, "create_if_absent", make)
        jobs.submit(small, LEAST)
    (left,) = recorder.objects.values()
    (warning,) = caplog.records
    assert f"{left['kind']} {left['metadata']['name']}" in warning.getMessage()
    messages(warning.msg)
    recorder.late = {}
    jobs.submit(small, LEAST)

    def found(each, found=client.find_object):
        there = found(each)
        recorder.objects[f"{JOBSETS}/demo"]["metadata"]["uid"] = "another of that name"
        return there

    monkeypatch.setattr(client, "find_object", found)
    with pytest.raises(TargetUnavailable, match="precondition failed"):
        jobs.request_stop(NAME)
    assert f"{JOBSETS}/demo" in recorder.objects


def test_a_workload_whose_answer_was_lost_is_the_job(recorder, small):
    recorder.lost = {("POST", "/jobsets"): (1, True)}
    assert jobs.submit(small, LEAST) == NAME
    (file,) = (each for path, each in recorder.objects.items() if "configmaps" in path)
    (owner,) = file["metadata"]["ownerReferences"]
    assert owner["uid"] == recorder.objects[f"{JOBSETS}/demo"]["metadata"]["uid"]


def test_a_workload_that_was_never_made_leaves_nothing(recorder, small):
    recorder.lost = {("POST", "/jobsets"): (1, False)}
    with pytest.raises(TargetUnavailable, match="API server"):
        jobs.submit(small, LEAST)
    assert recorder.objects == {}


def test_where_nobody_knows_whether_it_was_made_its_handle_is_said_and_its_file_stays(
    recorder, small, monkeypatch, messages
):
    def make(each, make=client.create_if_absent):
        if each["kind"] == "JobSet":
            recorder.lost = {("POST", "/jobsets"): (1, True), ("GET", "/jobsets/demo"): (9, False)}
        return make(each)

    monkeypatch.setattr(client, "create_if_absent", make)
    with pytest.raises(TargetUnavailable, match=f"status kubernetes:{NAME}") as unknown:
        jobs.submit(small, LEAST)
    assert len(recorder.objects) == 2
    messages(str(unknown.value).partition("; ")[2])  # before it stand the words of the client


def test_a_job_whose_file_gets_no_owner_runs_all_the_same(recorder, small, caplog, messages):
    recorder.lost = {("PATCH", ""): (1, False)}
    assert jobs.submit(small, LEAST) == NAME
    (warning,) = (record for record in caplog.records if "ConfigMap demo-" in record.getMessage())
    messages(warning.msg)


def test_a_file_that_the_collector_takes_at_that_moment_is_made_again(recorder, small, monkeypatch):
    jobs.submit(small, LEAST)
    recorder.statuses = [BROKEN]

    def collect(each, make=client.create_if_absent):
        made = make(each)
        if each["kind"] == "JobSet":
            (path,) = (path for path in recorder.objects if "configmaps" in path)
            del recorder.objects[path]
        return made

    monkeypatch.setattr(client, "create_if_absent", collect)
    jobs.submit(small, LEAST)
    (file,) = (each for path, each in recorder.objects.items() if "configmaps" in path)
    uid = recorder.objects[f"{JOBSETS}/demo"]["metadata"]["uid"]
    assert [each["uid"] for each in file["metadata"]["ownerReferences"]] == [uid]


def test_a_job_that_is_stopped_goes_and_who_waits_for_it_is_told(recorder, small, messages):
    jobs.submit(small, LEAST)
    waiting = jobs._poll_states(NAME, seconds=0.05)
    assert next(waiting).code is None
    jobs.request_stop(NAME)
    name, reason, code, _ = next(waiting)
    assert (name, code) == ("STOPPED", ExitCode.TERMINATED)
    messages(reason)
    for verb in (jobs.query_state, jobs.wait, jobs.request_stop):
        with pytest.raises(TargetUnavailable, match="demo") as gone:
            verb(NAME)
        messages(gone.value)


def test_where_no_server_answers_that_is_said(recorder, tmp_path, small):
    file = tmp_path / "config"
    file.write_text(file.read_text().replace("http://127.0.0.1:", "http://127.0.0.1:1/x"))
    with pytest.raises(TargetUnavailable, match="API server"):
        jobs.submit(small, LEAST)


def test_where_no_cluster_is_configured_that_is_said(recorder, monkeypatch, tmp_path, small):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(TargetUnavailable, match="no cluster"):
        jobs.submit(small, LEAST)


def test_a_job_that_cannot_be_written_is_refused_before_anybody_is_asked(recorder, small):
    with pytest.raises(UsageError, match="--claim"):
        jobs.submit(small, replace(LEAST, claim=""))
    assert recorder.requests == []


@pytest.mark.slow
def test_the_verb_prints_the_handle_alone_by_which_the_job_is_asked_about(recorder):
    def launch(*words: str) -> str:
        return run_bundle("launch", *words, code=0).stdout

    asked = ("demo", "--nodes=2", "--devices-per-node=1", "--hardware=cpu", "--claim=runs")
    image = ("--image=bundle", "--image-record=none")
    handle = launch("kubernetes", *asked, *image, "--apply", "--detach")
    assert handle == f"kubernetes:{NAME}\n"
    reason = "0/3 nodes are available"
    recorder.pods = [[pod("demo-node-0-0", "Pending", waits=reason)]]
    assert launch("status", handle.strip()) == f"kubernetes:{NAME} PENDING ({reason})\n"


@pytest.mark.clusters
@pytest.mark.parametrize("form", [form for form in FORMS_BY_NAME if form != "ascendjob"])
def test_a_real_cluster_trains_the_demo(form):
    pytest.importorskip("kubernetes")
    image, claim = os.environ.get("BUNDLE_IMAGE"), os.environ.get("BUNDLE_CLAIM")
    if not (os.environ.get("KUBECONFIG") and image and claim):
        pytest.skip("a cluster is named by KUBECONFIG, BUNDLE_IMAGE (none of ours) and BUNDLE_CLAIM")
    plan = build_plan(
        load("demo", ("train.steps=2",)), backend="cpu", hardware_name="cpu", nodes=2, per_node=1
    )
    job = from_plan(plan, Path(f"runs/demo-{form}"))
    name = jobs.submit(
        job, KubernetesOptions(image, claim, name=f"demo-{form}", form=form, shared_memory="1Gi")
    )
    try:
        shown = "".join(jobs.follow(name))
        assert jobs.wait(name) == 0, shown
        assert "step" in shown
    finally:
        jobs.request_stop(name)
