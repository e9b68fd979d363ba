"""Kubernetes: the objects of a job, in the form that its cluster schedules. `running` speaks to one.

One pod stands for each node and executes the job file, which it finds in a ConfigMap.
"""

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

from bundle import capabilities
from bundle.errors import UsageError, shown
from bundle.files import json_digest
from bundle.launch.job import NAME, Job
from bundle.targets.kubernetes import ascendjob, jobset, rayjob, trainer, volcano
from bundle.targets.kubernetes.options import Options
from bundle.targets.kubernetes.pod import Workload
from bundle.targets.kubernetes.status import Ended, by_conditions, by_phase, by_ray

_LARGEST_FILE = 1_000_000  # 1 MiB is that of a ConfigMap with its names


class Form(NamedTuple):
    """One way in which clusters take a job: its objects but for the job file, its workload the last."""

    api: str  # of the workload
    kind: str
    render: Callable[[Workload], list[dict[str, Any]]]
    what: str  # in the words of --help
    ended: Callable[[Mapping[str, Any]], Ended] = by_conditions  # of the workload's status
    topology: str | None = ""  # what --topology must be, as an expression; None: it has no such thing
    backends: tuple[str, ...] = ()  # empty: all
    longest: int = 63  # name of the workload, in characters
    extra: str = ""  # of ours that its image must have, and the images that we build have not


# By the name that --form takes, the default first.
FORMS = {
    "jobset": Form(jobset.API, "JobSet", jobset.jobset, "starts all nodes again when one is lost"),
    "job": Form(jobset.JOB_API, "Job", jobset.job, "ends then, and needs nothing installed"),
    "trainjob": Form(trainer.API, "TrainJob", trainer.trainjob, "of Kubeflow Trainer"),
    "volcano": Form(volcano.API, "Job", volcano.job, "of Volcano", ended=by_phase, topology="[1-9][0-9]*"),
    "rayjob": Form(
        rayjob.API, "RayJob", rayjob.rayjob, "of KubeRay", ended=by_ray, longest=rayjob.LONGEST, extra="ray"
    ),
    "ascendjob": Form(
        ascendjob.API, "AscendJob", ascendjob.job, "of MindCluster", topology=None, backends=("ascend",)
    ),
}


def named(job: Job) -> str:
    """The recipe's name as Kubernetes spells names."""
    return re.sub(r"[^a-z0-9]+", "-", job.recipe.name.lower()).strip("-")


def image(form: str) -> str:
    """What to say of a form whose image none of ours is; empty where ours will do."""
    extra = FORMS[form].extra
    return extra and (
        f"--form {form}: images of ours have no {extra}: say --image, of one that is made of ours"
        f" with `pip install 'mcore-bundle[{extra}]'`"
    )


def objects(job: Job, options: Options) -> list[dict[str, Any]]:
    """The objects of a job, in the order in which they are made. Raises UsageError with all that is wrong."""
    name, decided = options.name or named(job), job.text()
    of = Workload(job, options, name, f"{name}-{json_digest(job.dump())}")
    wrong = [*options.violations(name, job.nodes), *_misfits(job, options), *of.misfits()]
    wrong += volcano.misfits(of)
    if (size := len(decided.encode())) > _LARGEST_FILE:
        wrong.append(f"the job file has {size} bytes, more than a ConfigMap holds: shorten the recipe")
    if wrong:
        raise UsageError("no objects of Kubernetes can be written", wrong)
    file = of.object("v1", "ConfigMap", of.file)
    file |= {"immutable": True, "data": {NAME: LiteralScalarString(decided)}}
    return [file, *FORMS[options.form].render(of)]


def documents(job: Job, options: Options) -> str:
    """The objects as YAML documents."""
    return written(objects(job, options))


def written(of: Sequence[dict[str, Any]]) -> str:
    """Objects as YAML documents."""
    yaml, out = YAML(), io.StringIO()
    yaml.default_flow_style, yaml.width = False, 110
    yaml.explicit_start = True
    yaml.dump_all(of, out)
    return out.getvalue()


def _misfits(job: Job, options: Options) -> Iterator[str]:
    """All that the form cannot say."""
    form = FORMS.get(options.form)
    if form is None:
        yield f"--form {shown(options.form)}: one of {', '.join(FORMS)}"
        return
    name = options.name or named(job)
    if len(name) > form.longest:
        yield f"--name {shown(name)}: --form {options.form} takes at most {form.longest} characters"
    if form.backends and job.backend not in form.backends:
        yield f"--form {options.form}: is for {', '.join(form.backends)}, and the job for {job.backend}"
    if options.device and capabilities.of(job.backend).resource(job.generation) is None:
        yield f"--device {shown(options.device)}: the job is for {job.backend}, and asks for no device"
    if options.topology and form.topology is None:
        yield f"--topology {shown(options.topology)}: --form {options.form} has no such thing"
    elif options.topology and form.topology and not re.fullmatch(form.topology, options.topology):
        yield f"--topology {shown(options.topology)}: --form {options.form} takes the number of a tier"
