"""The options of a target: what a verb of `launch` takes is what the target knows of it."""

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bundle.cli import launch
from bundle.cli.request import JobRequest, Machines, expand_options
from bundle.targets import docker, images, raycluster
from bundle.targets.docker import DockerOptions
from bundle.targets.kubernetes import FORMS_BY_NAME
from bundle.targets.kubernetes.options import WORKLOAD_FORM_DESCRIPTIONS, KubernetesOptions
from bundle.targets.local import LocalOptions
from bundle.targets.ray import RayOptions
from bundle.targets.slurm.options import SlurmOptions
from tests.targets.kubernetes.jobs import planned

VERBS: dict[str, Any] = typer.main.get_command(launch.app).commands  # type: ignore[attr-defined]
COMMON = {field.name for group in (JobRequest, Machines) for field in fields(group)}

# Words for every option, and the fields that they fill.
WORDS: dict[type, tuple[str, dict[str, Any]]] = {
    LocalOptions: ("--restarts=2 --preflight", {"restarts": 2, "preflight": True}),
    DockerOptions: (
        "--mount=/a --mount=/b:/c:ro --env=A --env=B --user=1:2 --group=3 --group=4 --shared-memory=1g --rdma"
        " --grace=5 --restarts=6 --preflight",
        {
            "mounts": ("/a", "/b:/c:ro"), "environment": ("A", "B"), "user": "1:2", "groups": (3, 4),
            "shared_memory": "1g", "rdma": True, "grace_seconds": 5, "restarts": 6, "preflight": True,
        },
    ),
    SlurmOptions: (
        "--sbatch=time=1 --sbatch=exclusive --image=i --container=apptainer --mount=/a --mount=/b --rdma"
        " --restarts=2 --preflight --spares=3 --ray",
        {
            "sbatch": ("time=1", "exclusive"), "image": "i", "container": "apptainer", "mounts": ("/a", "/b"),
            "rdma": True, "restarts": 2, "preflight": True, "spares": 3, "ray": True,
        },
    ),
    KubernetesOptions: (
        "--claim=c --form=job --name=n --namespace=s --mount=a:/a --mount=b:/b --resource=cpu=1"
        " --resource=memory=1 --device=d/e --selector=k=1 --selector=l=2 --annotation=k=3 --annotation=l=4"
        " --group=5 --group=6 --shared-memory=1Gi --rdma --secret=t --queue=q --topology=z --priority=p"
        " --restarts=7 --preflight --grace=8 --keep=9 --label=a=1 --toleration=a --node-affinity=a=b,c"
        " --exclude-node=n1 --exclude-node=n2 --image-pull-secret=p --service-account=sa --runtime-class=rc"
        " --host-path=/a:/b --patch=p.yaml",
        {
            "claim": "c", "form": "job", "name": "n", "namespace": "s", "mounts": ("a:/a", "b:/b"),
            "resources": ("cpu=1", "memory=1"), "device": "d/e", "selectors": ("k=1", "l=2"),
            "annotations": ("k=3", "l=4"), "groups": (5, 6), "shared_memory": "1Gi", "rdma": True,
            "secret": "t", "queue": "q", "topology": "z", "priority": "p", "restarts": 7, "preflight": True,
            "grace_seconds": 8, "keep_seconds": 9, "labels": ("a=1",), "tolerations": ("a",),
            "node_affinity": ("a=b,c",), "excluded_nodes": ("n1", "n2"), "pull_secrets": ("p",),
            "service_account": "sa", "runtime_class": "rc", "host_paths": ("/a:/b",), "patch": Path("p.yaml"),
        },
    ),
    RayOptions: (
        "--address=http://h:1 --restarts=2 --preflight --wait=3",
        {"address": "http://h:1", "restarts": 2, "preflight": True, "wait": 3},
    ),
}  # fmt: skip
# What no option of the class says: the verb chooses it.
CHOSEN = {"image", "mcore", "owner", "python"}


@pytest.mark.parametrize("options", WORDS)
def test_every_option_of_a_target_fills_its_field_and_without_it_the_default_stays(options):
    app, called = typer.Typer(), []

    @app.command()
    @expand_options
    def verb(chosen: options) -> None:  # type: ignore[valid-type]
        called.append(chosen)

    words, values = WORDS[options]
    for arguments in (words.split(), []):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
    assert called == [options(**values), options()]
    assert {field.name for field in fields(options)} - set(values) <= CHOSEN


@pytest.mark.parametrize(
    ("target", "word"),
    [
        ("local", "--restarts=-1"),
        ("docker", "--group=-1"),
        ("docker", "--grace=0"),
        ("slurm", "--container=x"),
        ("slurm", "--spares=-1"),
        ("kubernetes", "--form=x"),
        ("kubernetes", "--group=-1"),
        ("kubernetes", "--restarts=-1"),
        ("kubernetes", "--keep=-1"),
        ("ray", "--wait=0"),
    ],
)
def test_a_value_that_an_option_does_not_take_is_refused_before_the_recipe_is_read(target, word):
    done = CliRunner().invoke(launch.app, [target, "no-such-recipe", word])
    assert done.exit_code == 2 and word.partition("=")[0] in done.output


@pytest.mark.parametrize("target", ["local", "docker", "slurm", "kubernetes", "ray"])
def test_the_options_of_a_target_are_those_that_are_recorded(target, messages):
    for option in VERBS[target].params:
        if option.name not in COMMON and option.param_type_name == "option":
            default = "" if option.default in (None, (), []) else option.default
            messages(f"{', '.join(option.opts)} {option.metavar or ''} [{default}] {option.help}")


def test_every_form_has_a_help_text():
    assert list(FORMS_BY_NAME) == list(WORKLOAD_FORM_DESCRIPTIONS)


def run_verb(*words: str) -> list[str]:
    """Return the words that `launch` prints."""
    done = CliRunner().invoke(launch.app, words)
    assert done.exit_code == 0, done.output
    return done.stdout.split()


def test_a_container_of_docker_has_our_user_and_the_group_of_npus_unless_others_are_named(monkeypatch):
    monkeypatch.setattr(docker, "find_npu_unix_groups", lambda: (7,))
    words = ("docker", "demo", "--image=x", "--image-record=none", "--dry-run")
    npus = ("--hardware=a3", "--set=train.global_batch_size=128")
    ours, named = {f"--user={os.getuid() or images.USER}:0"}, {"--user=1:2", "--group-add=3", "--group-add=4"}
    for machine, chosen, expected in (
        (["--backend=cpu"], [], ours),
        (npus, [], ours | {"--group-add=7"}),
        (npus, ["--user=1:2", "--group=3", "--group=4"], named),
    ):
        printed = run_verb(*words, *machine, *chosen)
        assert {word for word in printed if word.startswith(("--user", "--group"))} == expected


def test_a_node_of_this_machine_imports_the_megatron_that_is_asked_for():
    assert "--mcore=0.17.1" in run_verb("local", "demo", "--hardware=cpu", "--mcore=0.17.1", "--dry-run")


def test_a_form_that_no_image_of_ours_can_run_takes_one_that_is_named():
    words = ("--form=rayjob", "--image=ours-with-ray", "--image-record=none", "--hardware=cpu")
    assert "ours-with-ray" in run_verb("kubernetes", "demo", *words)


def test_machines_wait_for_a_cluster_of_their_own_as_long_as_is_said(tmp_path, monkeypatch):
    called: list[int] = []

    def run_cluster(job, path, rendezvous, drive, wait) -> int:
        called.append(wait)
        return 0

    monkeypatch.setattr(raycluster, "run_node", run_cluster)
    file = tmp_path / "job.json"
    file.write_text(planned(1, 2, "cpu", "cpu").to_text())
    assert run_verb("ray", f"--job={file}", "--start", "--wait=3") == []
    assert called == [3]
