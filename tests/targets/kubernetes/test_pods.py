"""The pods of a job, without a cluster: processes that see the files, names and words of the manifest.

Each pod has a mount namespace of its own, where its volumes are mounted over directories of this machine and
/etc/hosts knows the names that the headless service would; all of them share this machine's network.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bundle.launch.job import Job, from_plan
from bundle.planning import build_plan
from bundle.preflight import nodes
from bundle.recipe import load
from bundle.targets import kubernetes
from bundle.targets.kubernetes.options import KubernetesOptions
from tests.command import run_bundle, sets, start_bundle
from tests.targets.kubernetes.jobs import Objects, pods

pytestmark = pytest.mark.clusters
RECIPE = (
    "train={steps: 6, micro_batch_size: 4, global_batch_size: 8, log_interval: 1, eval_interval: 6}",
    "optimizer.warmup_steps=0",
    "data.validation=0",
)


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    pytest.importorskip("megatron.core")
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("pods need mount namespaces: root, and unshare")


def decided() -> Job:
    made = build_plan(load("demo", RECIPE), nodes=2, per_node=1)
    made.raise_gravest_problem()
    return from_plan(made, Path("runs/demo"))


def told(form: str, name: str, index: int) -> dict[str, str]:
    """What the controller of a form says to a pod, by variables."""
    if form == "volcano":
        return {"VC_TASK_INDEX": str(index)}
    variables = {"JOB_COMPLETION_INDEX": str(index)}
    if form == "trainjob":
        variables |= {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(index)}
        variables |= {"PET_MASTER_ADDR": f"{name}-node-0-0.{name}", "PET_MASTER_PORT": "29500"}
    return variables


def start(objects: Objects, form: str, index: int, root: Path, home: Path) -> subprocess.Popen[str]:
    """Starts the pod of one index, as the kubelet would."""
    ((count, template),) = pods(objects)
    (container,) = template["spec"]["containers"]
    name = subdomain = objects[-1]["metadata"]["name"]
    stem = {"job": name, "volcano": f"{name}-node"}.get(form, f"{name}-node-0")
    hosts = root / f"hosts-{index}"
    names = "".join(f"127.0.0.1 {stem}-{n}.{subdomain} {stem}-{n}\n" for n in range(count))
    hosts.write_text(f"127.0.0.1 localhost\n{names}")
    files = root / f"job-{index}"
    files.mkdir()
    for file, content in objects[0]["data"].items():
        (files / file).write_text(content)
    sources = {"job": files, "home": home}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {*sources, "shm", "tmp"}
    # The parents of a mount are nowhere on this machine: they are made on a file system of the pod's own.
    script = ["mount --bind $HOSTS /etc/hosts"]
    for parent in sorted({str(Path(mounts[volume]).parent) for volume in sources}):
        script.append(f"mount -t tmpfs none {parent}")
    script += [
        f"mkdir {mounts[volume]}; mount --bind {path} {mounts[volume]}" for volume, path in sources.items()
    ]
    script += [f"cd {container['workingDir']}", 'exec "$@"']
    variables = told(form, name, index)
    words = [re.sub(r"\$\((\w+)\)", lambda of: variables[of[1]], word) for word in container["args"]]
    (node,) = container["env"]
    assert node["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    variables |= {"HOSTS": str(hosts), "PATH": os.environ["PATH"], node["name"]: f"worker-{index}"}
    return start_bundle(
        *words,
        base=variables | {"HOME": mounts["home"]},
        within=("unshare", "--mount", "sh", "-ec", "\n".join(script), "sh"),
        stderr=subprocess.STDOUT,
    )


def test_the_pods_ask_their_nodes_first(tmp_path):
    objects = kubernetes.build_objects(
        decided(), KubernetesOptions(image="bundle", claim="runs", form="job", preflight=True)
    )
    home = tmp_path / "home"
    home.mkdir()
    pods = [start(objects, "job", index, tmp_path, home) for index in (1, 0)]
    said = [pod.communicate(timeout=300)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], "\n".join(said)
    passing = home / "runs/demo/logs" / nodes.PREFLIGHT_FOLDER / "passing.txt"
    assert passing.read_text().splitlines() == ["worker-0", "worker-1"]


def losses(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


@pytest.mark.parametrize(
    "form", [form for form in kubernetes.FORMS_BY_NAME if form not in ("ascendjob", "rayjob")]
)
def test_the_pods_train_what_one_node_trains(form, tmp_path):
    objects = kubernetes.build_objects(decided(), KubernetesOptions(image="bundle", claim="runs", form=form))
    home = tmp_path / "home"
    home.mkdir()
    pods = [start(objects, form, index, tmp_path, home) for index in (1, 0)]
    said = [pod.communicate(timeout=300)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], "\n".join(said)
    run_bundle("train", "demo", *sets(*RECIPE), cwd=tmp_path, code=0)
    executed = json.loads((home / "runs/demo/job.json").read_text())
    assert (executed["nodes"], executed["per_node"]) == (2, 1)
    assert losses(home / "runs/demo") == pytest.approx(losses(tmp_path / "runs/demo"), rel=1e-6)
