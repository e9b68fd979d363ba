"""`mcore-bundle launch kubernetes`: prints the objects of a job, or makes them."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bundle.cli import options
from bundle.cli.launch.submission import (
    ContainerImage,
    Detach,
    decide_job,
    print_handle_or_follow_job,
    warn_absent_inputs,
    warn_short_grace,
    warn_undetermined_step_count,
    warn_unmounted_inputs,
)
from bundle.cli.request import JobRequest, Machines
from bundle.errors import UsageError
from bundle.planning.inputs import find_input_problems_except_packages
from bundle.targets import images
from bundle.targets import kubernetes as objects
from bundle.targets.kubernetes import jobs, pod
from bundle.targets.kubernetes.options import KubernetesOptions

_log = logging.getLogger(__name__)


def kubernetes(
    recipe: options.Recipe,
    request: JobRequest,
    machines: Machines,
    *,
    container_image: ContainerImage,
    kubernetes_options: KubernetesOptions,
    apply: Annotated[
        bool, typer.Option("--apply", help="Create the objects, follow the job, and exit with its code.")
    ] = False,
    detach: Detach = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the objects.")] = False,
) -> None:
    """Print the objects of a job, for `kubectl apply -f -`, or make them."""
    missing_image = (
        "" if container_image.image else objects.describe_extra_missing_from_images(kubernetes_options.form)
    )
    if missing_image:
        raise UsageError(missing_image)
    image_record = container_image.read_contents_or_undecided()
    job = decide_job(request.load_recipe(recipe), request, machines, image_record)
    if job.backend == "cpu" and job.recipe.backend == "auto" and not (machines.hardware or request.backend):
        _log.warning(
            "the plan is for cpu, because this machine has no accelerator. If the nodes have accelerators,"
            " set --hardware"
        )
    if (endpoint := job.recipe.metrics.prometheus) is not None and endpoint.is_loopback:
        _log.warning(
            "metrics.prometheus.address: only the pod itself reaches %s. Set it to 0.0.0.0", endpoint.address
        )
    kubernetes_options = replace(kubernetes_options, image=container_image.choose_name(job))
    warn_undetermined_step_count(job, recipe)
    warn_short_grace(job, kubernetes_options.grace_seconds)
    mount_advice = "set --mount CLAIM:{}, with a claim that holds it"
    warn_absent_inputs(find_input_problems_except_packages(job.recipe))
    warn_unmounted_inputs(job, pod.list_claim_mounts(kubernetes_options), Path(images.HOME), mount_advice)
    if apply and not dry_run:
        print_handle_or_follow_job(f"kubernetes:{jobs.submit(job, kubernetes_options)}", detach=detach)
    else:
        print(objects.render_documents(job, kubernetes_options), end="")
