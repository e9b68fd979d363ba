"""Kubernetes: the objects of a job, in the form that its cluster schedules. `jobs` talks to the cluster.

Each node has one pod, which executes the job file in a ConfigMap.
"""

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

from bundle import capabilities
from bundle.errors import UsageError, format_value
from bundle.files import compute_short_json_digest
from bundle.launch.job import FILE_NAME, Job
from bundle.targets.kubernetes import ascendjob, jobset, rayjob, trainer, volcano
from bundle.targets.kubernetes.options import KubernetesOptions
from bundle.targets.kubernetes.patching import apply_patches, read_patches
from bundle.targets.kubernetes.pod import Workload
from bundle.targets.kubernetes.status import (
    WorkloadOutcome,
    read_conditions,
    read_ray_status,
    read_volcano_phase,
)

_MAX_JOB_FILE_BYTES = 1_000_000  # bytes; a ConfigMap holds 1 MiB with its names


class Form(NamedTuple):
    """One way in which clusters take a job: its objects without the job file, with the workload last."""

    api: str  # of the workload
    kind: str
    render: Callable[[Workload], list[dict[str, Any]]]
    read_outcome: Callable[[Mapping[str, Any]], WorkloadOutcome] = read_conditions  # of the workload's status
    topology: str | None = ""  # a regular expression for --topology; None: the form has no topology
    backends: tuple[str, ...] = ()  # empty: all
    most_characters: int = 63  # the longest name of the workload
    extra: str = ""  # our extra that its image needs, and that the images that we build lack


# By the name that --form takes, as in WORKLOAD_FORM_DESCRIPTIONS.
FORMS_BY_NAME = {
    "jobset": Form(jobset.API, "JobSet", jobset.build_jobset),
    "job": Form(jobset.JOB_API, "Job", jobset.build_indexed_job),
    "trainjob": Form(trainer.API_VERSION, "TrainJob", trainer.build_trainjob),
    "volcano": Form(
        volcano.API_VERSION,
        "Job",
        volcano.build_volcano_job,
        read_outcome=read_volcano_phase,
        topology="[1-9][0-9]*",
    ),
    "rayjob": Form(
        rayjob.API_VERSION,
        "RayJob",
        rayjob.build_rayjob,
        read_outcome=read_ray_status,
        most_characters=rayjob.MAX_NAME_CHARACTERS,
        extra="ray",
    ),
    "ascendjob": Form(
        ascendjob.API_VERSION,
        "AscendJob",
        ascendjob.build_ascendjob,
        topology=None,
        backends=("ascend",),
    ),
}


def sanitize_recipe_name(job: Job) -> str:
    """Return the recipe's name with the characters that Kubernetes allows."""
    return re.sub(r"[^a-z0-9]+", "-", job.recipe.name.lower()).strip("-")


def describe_extra_missing_from_images(form: str) -> str:
    """Return the message about a form that none of our images can run; empty where ours can run it."""
    extra = FORMS_BY_NAME[form].extra
    return extra and (
        f"--form {form}: the images of mcore-bundle do not contain {extra}. Build a new image from one of"
        f" them with `pip install 'mcore-bundle[{extra}]'`, and name the new image with --image"
    )


def build_objects(job: Job, options: KubernetesOptions) -> list[dict[str, Any]]:
    """Return the objects of a job in the order of creation. Raise UsageError with all that is wrong."""
    name, job_text = options.name or sanitize_recipe_name(job), job.to_text()
    workload = Workload(job, options, name, f"{name}-{compute_short_json_digest(job.dump())}")
    wrong = [
        *options.find_violations(name, job.nodes),
        *_find_unsupported_options(job, options),
        *workload.find_option_violations(),
    ]
    wrong += volcano.find_invalid_super_pod_block(workload)
    if (size := len(job_text.encode())) > _MAX_JOB_FILE_BYTES:
        wrong.append(f"the job file has {size} bytes, more than a ConfigMap holds: shorten the recipe")
    if wrong:
        raise UsageError("the Kubernetes objects cannot be generated", wrong)
    file = workload.build_manifest_skeleton("v1", "ConfigMap", workload.config_map)
    file |= {"immutable": True, "data": {FILE_NAME: LiteralScalarString(job_text)}}
    manifests = [file, *FORMS_BY_NAME[options.form].render(workload)]
    if options.patch is not None:
        apply_patches(manifests, read_patches(options.patch))
    return manifests


def render_documents(job: Job, options: KubernetesOptions) -> str:
    """Return the objects of a job as YAML documents."""
    return to_yaml(build_objects(job, options))


def to_yaml(manifests: Sequence[dict[str, Any]]) -> str:
    """Return objects as YAML documents."""
    yaml, out = YAML(), io.StringIO()
    yaml.default_flow_style, yaml.width = False, 110
    yaml.explicit_start = True
    yaml.dump_all(manifests, out)
    return out.getvalue()


def _find_unsupported_options(job: Job, options: KubernetesOptions) -> Iterator[str]:
    """Yield a message for each option that the chosen form does not support."""
    form = FORMS_BY_NAME.get(options.form)
    if form is None:
        yield f"--form {format_value(options.form)}: must be one of {', '.join(FORMS_BY_NAME)}"
        return
    name = options.name or sanitize_recipe_name(job)
    if len(name) > form.most_characters:
        yield (
            f"--name {format_value(name)}: --form {options.form} allows at most"
            f" {form.most_characters} characters"
        )
    if form.backends and job.backend not in form.backends:
        backends = ", ".join(form.backends)
        yield (
            f"--form {options.form}: supports only backend {backends}, but the job has backend {job.backend}"
        )
    if options.device and capabilities.find_capabilities(job.backend).find_resource(job.generation) is None:
        yield f"--device {format_value(options.device)}: backend {job.backend} needs no device. Leave it out"
    if options.topology and form.topology is None:
        yield f"--topology {format_value(options.topology)}: not supported by --form {options.form}"
    elif options.topology and form.topology and not re.fullmatch(form.topology, options.topology):
        topology = format_value(options.topology)
        yield f"--topology {topology}: --form {options.form} needs a tier number, such as 2"
