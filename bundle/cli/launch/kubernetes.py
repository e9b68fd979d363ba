"""`mcore-bundle launch kubernetes`: the options that only Kubernetes has."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from bundle.cli import options
from bundle.cli.launch.submission import (
    Detach,
    Grace,
    Image,
    Registry,
    decide_job,
    follow_submitted_job,
    read_image_record,
    warn_absent_inputs,
    warn_hidden_inputs,
    warn_unknown_steps,
)
from bundle.cli.request import JobRequest, Machines
from bundle.errors import UsageError
from bundle.planning.inputs import find_absent_inputs
from bundle.targets import images
from bundle.targets import kubernetes as objects
from bundle.targets.kubernetes import jobs, pod
from bundle.targets.kubernetes.options import DEFAULT_CLAIM, KubernetesOptions

_log = logging.getLogger(__name__)


def kubernetes(
    recipe: options.Recipe,
    request: JobRequest,
    machines: Machines,
    claim: Annotated[
        str, typer.Option(help="The PersistentVolumeClaim of the run directory, which all nodes see.")
    ] = DEFAULT_CLAIM,
    container_image: Image = "",
    registry: Registry = images.DEFAULT_REGISTRY,
    record: options.ImageRecordOrNone = "",
    form: Annotated[
        str,
        typer.Option(
            callback=options.allow_only(tuple(objects.FORMS)),
            help="; ".join(f"{name} {form.help_text}" for name, form in objects.FORMS.items()) + ".",
        ),
    ] = next(iter(objects.FORMS)),
    name: Annotated[str, typer.Option(help="Of the objects; without it, the recipe's.")] = "",
    namespace: Annotated[str, typer.Option(help="Where they are made; without it, where kubectl is.")] = "",
    mounts: Annotated[
        list[str] | None,
        typer.Option("--mount", metavar="CLAIM:/PATH", help="Another claim, of data or of a model."),
    ] = None,
    resources: Annotated[
        list[str] | None,
        typer.Option(
            "--resource", metavar="NAME=QUANTITY", help="Of each node: memory=512Gi, cpu=64, rdma/ib=8, ..."
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="What the cluster calls a device, if not as its vendor.")
    ] = "",
    selectors: Annotated[
        list[str] | None,
        typer.Option("--selector", metavar="KEY=VALUE", help="A label of the nodes that it runs on."),
    ] = None,
    annotations: Annotated[
        list[str] | None,
        typer.Option("--annotation", metavar="KEY=VALUE", help="Of the workload and of its pods."),
    ] = None,
    groups: Annotated[
        list[int] | None,
        typer.Option("--group", min=0, metavar="GID", help="Of the pods: that of an NPU's device files."),
    ] = None,
    shared_memory: Annotated[str, typer.Option(metavar="QUANTITY", help="Size of /dev/shm.")] = "64Gi",
    rdma: Annotated[bool, typer.Option("--rdma", help="Let the pods pin memory for a network card.")] = False,
    secret: Annotated[str, typer.Option(help="A Secret whose keys become variables.")] = "",
    queue: Annotated[str, typer.Option(help="Of Kueue or Volcano, which start all pods or none.")] = "",
    topology: Annotated[
        str, typer.Option(help="The level that Kueue keeps all pods within, the tier that Volcano does.")
    ] = "",
    priority: Annotated[str, typer.Option(help="A PriorityClass.")] = "",
    restarts: Annotated[int, typer.Option(min=0, help="How often all nodes are started again.")] = 10,
    preflight: options.Preflight = False,
    grace: Grace = None,
    keep: Annotated[
        int, typer.Option(min=0, metavar="SECONDS", help="How long the objects are kept after the end.")
    ] = 7 * 24 * 3600,
    apply: Annotated[
        bool, typer.Option("--apply", help="Make them, show what the job writes, and end as it does.")
    ] = False,
    detach: Detach = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print them, even so.")] = False,
) -> None:
    """Print the objects of a job, for `kubectl apply -f -`, or make them."""
    if not container_image and (missing_image := objects.explain_missing_image(form)):
        raise UsageError(missing_image)
    image_record = read_image_record(container_image, record)
    job = decide_job(request.load_recipe(recipe), request, machines, image_record)
    if job.backend == "cpu" and job.recipe.backend == "auto" and not (machines.hardware or request.backend):
        _log.warning("planned for cpu, all that this machine has: say --hardware where nodes have more")
    kubernetes_options = KubernetesOptions(
        image=container_image or images.choose_image(job, registry),
        claim=claim,
        name=name,
        form=form,
        namespace=namespace,
        mounts=tuple(mounts or ()),
        device=device,
        resources=tuple(resources or ()),
        selectors=tuple(selectors or ()),
        annotations=tuple(annotations or ()),
        groups=tuple(groups or ()),
        shared_memory=shared_memory,
        rdma=rdma,
        secret=secret,
        queue=queue,
        topology=topology,
        priority=priority,
        restarts=restarts,
        preflight=preflight,
        grace_seconds=grace,
        keep_seconds=keep,
    )
    warn_unknown_steps(job, recipe)
    mount_advice = "say --mount CLAIM:{}, of a claim that holds it"
    warn_absent_inputs(find_absent_inputs(job.recipe))
    warn_hidden_inputs(job, pod.list_mounts(kubernetes_options), Path(pod.HOME), mount_advice)
    if apply and not dry_run:
        follow_submitted_job(f"kubernetes:{jobs.submit(job, kubernetes_options)}", detach=detach)
    else:
        print(objects.render_documents(job, kubernetes_options), end="")
