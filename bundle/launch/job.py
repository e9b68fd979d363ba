"""The job file: all decisions about a job, made once, as the data that its nodes and ranks execute.

A starter of ranks needs nothing else, be it our launcher, torchrun, Slurm or Kubernetes. A reader does not
trust the file: it is data, checked before anything happens, and only names code of this package.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from bundle import capabilities, files
from bundle.environment import BACKENDS, MOST_RANKS, MOST_RANKS_PER_NODE, image, packages
from bundle.environment.image import BuildInfo
from bundle.environment.packages import MegatronCopies, parse_base_version
from bundle.errors import BundleError, EnvironmentUnfit, UsageError, format_validation_errors, format_value
from bundle.files import compute_short_json_digest
from bundle.launch import FilePath, Start, outcomes
from bundle.launch.command import NODE_WAIT_SECONDS, Launch
from bundle.launch.rendezvous import Rendezvous
from bundle.launch.starters import DEFAULT_PORT, parse_host_and_port
from bundle.patches import megatron_core, plan
from bundle.patches.plan import PatchPlan, survey_patches
from bundle.planning import Plan, to_json
from bundle.planning.plan import with_kernel
from bundle.recipe import Recipe, from_mapping

FILE_NAME = "job.json"
FORMAT, VERSION = "mcore-bundle job", 1
UNDECIDED: Final = "undecided"
MOST_BYTES = 1 << 24
_REWRITE_HINT = "Write the file again: mcore-bundle plan RECIPE --job FILE"
Text = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]
_STRICT_CONFIG = ConfigDict(extra="forbid", strict=True, defer_build=True)


def _read_recipe(value: Any) -> Recipe:
    return from_mapping(value, "its recipe") if isinstance(value, dict) else value


def _read_patches(value: Any) -> PatchPlan | None:
    if value == UNDECIDED:
        return None
    return plan.load_patch_plan(value) if isinstance(value, dict) else value


def _dump_patches_or_undecided(patches: PatchPlan | None) -> Any:
    return patches.dump() if patches else UNDECIDED


@dataclass(frozen=True, kw_only=True, config=_STRICT_CONFIG)
class Job:
    """One decided job. The room that a value belongs to checks it when the file is read."""

    recipe: Annotated[Recipe, BeforeValidator(_read_recipe), PlainSerializer(Recipe.dump)]
    backend: str = Field(pattern=f"^({'|'.join(BACKENDS)})$")
    nodes: int = Field(ge=1, le=MOST_RANKS)
    per_node: int = Field(ge=1, le=MOST_RANKS_PER_NODE)
    generation: Text = ""  # of the planned devices, as in `capabilities`; "": unknown
    environment: dict[Text, Text]  # the variables of the ranks
    attention: str = Field(pattern="^(auto|flash|fused|unfused)$")  # the kernel in the plan
    # For servers on the trainer's devices: their share of the memory, and the trainer's peak [bytes].
    mem_fraction_static: float | None = Field(default=None, gt=0, lt=1)
    learning_bytes: int = Field(default=0, ge=0)
    megatron: Text  # the planned version
    # None: the sources of megatron-core were not available for planning.
    patches: Annotated[
        PatchPlan | None, BeforeValidator(_read_patches), PlainSerializer(_dump_patches_or_undecided)
    ]
    allow_drift: tuple[Text, ...] = ()
    # The record of the job's image. None: not one of our images; undecided: its content is unknown.
    image: BuildInfo | Literal["undecided"] | None
    directory: FilePath  # the run directory
    start: Start
    plan: dict[str, Any]  # for people and programs; ranks do not execute it

    @cached_property
    def recipe_with_planned_attention(self) -> Recipe:
        """The recipe that ranks compute, with the kernel of the plan, whatever device a node has."""
        values = self.recipe.dump()
        values["model"]["attention"] = self.attention
        return from_mapping(values, "the job's recipe")

    @cached_property
    def agreement_fields(self) -> Mapping[str, str]:
        """The values that must be the same on every rank, by name: no paths, no facts about one machine."""
        return {
            "recipe": compute_short_json_digest(self.recipe.dump()),
            "backend": self.backend,
            "layout": f"{self.nodes} x {self.per_node}",
            "environment": compute_short_json_digest(
                {k: v for k, v in self.environment.items() if k not in self.overridable_variables}
            ),
            "attention": self.attention,
            "image": _digest_image_record(self.image),
            "start": compute_short_json_digest(self.start.model_dump(mode="json")),
            "planned for megatron-core": self.megatron,
            **(self.patches.get_rank_invariant_fields() if self.patches else {"patches": UNDECIDED}),
        }

    @cached_property
    def overridable_variables(self) -> frozenset[str]:
        """The names of the variables in `environment` that each node may set to another value."""
        table = capabilities.find_capabilities(self.backend).list_variables(self.recipe.features, self.nodes)
        return frozenset(variable.name for variable in table if variable.is_overridable) - set(
            self.recipe.environment
        )

    @property
    def agreement_digest(self) -> str:
        """The digest of `agreement_fields`, 16 hexadecimal digits."""
        return compute_short_json_digest(self.agreement_fields)

    def dump(self) -> dict[str, Any]:
        """Return the JSON values of the file."""
        document = {"format": FORMAT, "version": VERSION}
        document |= _ADAPTER.dump_python(self, mode="json", by_alias=True)
        return document | {"digest": compute_short_json_digest(document)}

    def to_text(self) -> str:
        """Return the text of the file."""
        return self._text

    @cached_property
    def _text(self) -> str:
        # A thousand nodes of a dry run have one text.
        return json.dumps(self.dump(), indent=1) + "\n"


_ADAPTER = TypeAdapter(Job)


def _digest_image_record(record: BuildInfo | Literal["undecided"] | None) -> str:
    if isinstance(record, BuildInfo):
        return compute_short_json_digest(record.model_dump())
    return record or "none"


def get_rendezvous_or_placeholder(job: Job, rendezvous: str) -> str:
    """Return the rendezvous in printed commands; a placeholder where several nodes have none."""
    return rendezvous or (f"HOST:{DEFAULT_PORT}" if job.nodes > 1 else "")


def find_rendezvous_problems(job: Job, rendezvous: str) -> list[str]:
    """Return the problems of the rendezvous "HOST:PORT" of a job; empty for a single node."""
    if rendezvous and parse_host_and_port(rendezvous) is None:
        return [f"--rendezvous {format_value(rendezvous)}: must be HOST:PORT"]
    if job.nodes > 1 and not rendezvous:
        return [
            f"--rendezvous: missing, but the job has {job.nodes} nodes. On each node, set --node-rank and"
            " --rendezvous HOST:PORT, the address of node 0"
        ]
    return []


def build_train_arguments(
    job: Job,
    file: Path,
    node_rank: int | str = 0,
    rendezvous: str = "",
    restarts: int = 0,
    *,
    preflight: bool = False,
    spares: int = 0,
) -> tuple[str, ...]:
    """Return the arguments of `mcore-bundle` that execute a job from a file on one node.

    A text as `node_rank` is a placeholder that a scheduler replaces by the number. Without a `rendezvous`,
    the starter of the nodes tells them their numbers and where they meet.
    """
    arguments = ["train", f"--job={file}", *([f"--restarts={restarts}"] if restarts else [])]
    arguments += ["--preflight"] if preflight else []
    arguments += [f"--spares={spares}"] if spares else []
    if job.nodes > 1 and rendezvous:
        arguments += [f"--nodes={job.nodes}", f"--node-rank={node_rank}", f"--rendezvous={rendezvous}"]
    return tuple(arguments)


def build_launch(
    job: Job, rendezvous: Rendezvous, wait: int = NODE_WAIT_SECONDS, python: str = sys.executable
) -> Launch:
    """Return the start of one node's ranks, which execute a copy of the job in the launch's log folder.

    The copy is needed because the next launch, or that of another node, may execute another job.
    """
    logs = outcomes.find_next_log_folder(job.directory, rendezvous.node_rank)
    return Launch(
        arguments=("train", f"--job={logs / FILE_NAME}"),
        rendezvous=rendezvous,
        per_node=job.per_node,
        logs=logs,
        environment=job.environment,
        overridable_variables=job.overridable_variables,
        files={FILE_NAME: job.to_text()},
        wait=wait,
        python=python,
    )


def from_plan(
    job_plan: Plan,
    directory: Path,
    *,
    start: Start | None = None,
    record: BuildInfo | Literal["undecided"] | None = None,
) -> Job:
    """Return the job of a plan without problems. Raise PatchError for patches that cannot be applied."""
    plan_values, share = to_json(job_plan), job_plan.device_share
    del plan_values["recipe"]
    return Job(
        recipe=job_plan.recipe,
        backend=job_plan.hardware.backend,
        nodes=job_plan.nodes,
        per_node=job_plan.per_node,
        generation=job_plan.hardware.oldest_generation.value or "",
        environment=job_plan.environment_variables,
        attention=job_plan.attention.value,
        mem_fraction_static=share.chosen if share else None,
        learning_bytes=max(
            stage.states.device_total + stage.activations.total_peak for stage in job_plan.memory
        )
        if share
        else 0,
        megatron=job_plan.megatron.version,
        patches=job_plan.patch_plan if job_plan.patches.core.root and record != UNDECIDED else None,
        allow_drift=job_plan.allow_drift,
        image=record,
        directory=directory,
        start=start or Start(),
        plan=plan_values,
    )


def decide_patches(job: Job) -> Job:
    """Return the job with its patches decided for the megatron-core and the image of this node.

    Raise EnvironmentUnfit for a node that the job was not planned for, and the errors of the decisions.
    """
    check_node_environment(job)
    installed_packages, reviewed = packages.detect(), megatron_core.load_review_table()
    patch_subject = megatron_core.find_installed_or_default_core(installed_packages, reviewed)
    features = with_kernel(job.recipe.features, job.attention)
    patch_survey = survey_patches(
        patch_subject,
        reviewed,
        installed_packages,
        backend=job.backend,
        features=features,
        allowed=job.allow_drift,
    )
    return replace(job, patches=plan.build_patch_plan(patch_survey), image=image.read_own_record())


def check_node_environment(job: Job) -> None:
    """Raise EnvironmentUnfit with every difference between this node and the one that the job needs."""
    if unfit := list(find_misfits(job, packages.detect().megatron, image.read_own_record())):
        raise EnvironmentUnfit("this node does not have the environment that the job was planned for", unfit)


def find_misfits(job: Job, installed: MegatronCopies, record: BuildInfo | None) -> Iterator[str]:
    """Yield every difference between this node and the one that the job needs.

    `record` is that of this node's image.
    """
    if job.image != UNDECIDED and record != job.image:
        yield from image.compare_records(job.image, record)
    core = installed.core
    if core is None:
        yield f"megatron-core: {job.megatron} in the job, none here"
    elif job.patches is not None:
        yield from job.patches.find_mismatches(core)
    elif (
        installed_version := parse_base_version(core.version or "") or megatron_core.DEFAULT_RELEASE
    ) != parse_base_version(job.megatron):
        yield f"megatron-core: {job.megatron} in the job, {installed_version} here"


def load(file: Path) -> Job:
    """Return the job in a file. Raise UsageError with the file and its problem."""
    try:
        return parse(files.read_content(file, MOST_BYTES))
    except OSError as error:
        raise UsageError(f"--job {file}: {error.strerror}") from error
    except BundleError as error:
        raise UsageError(f"--job {file}: {error}") from error


def parse(data: bytes | str) -> Job:
    """Return the job that `Job.to_text` wrote. Raise UsageError for anything else."""
    document, digest = _parse_and_digest_fields(data)
    if document.get("format") != FORMAT:
        raise UsageError("this is not a job file of mcore-bundle")
    if document.get("version") != VERSION:
        raise UsageError(
            f"the job file has version {format_value(document.get('version'))}, but this mcore-bundle"
            f" executes version {VERSION}. {_REWRITE_HINT}"
        )
    if (declared := document.get("digest")) != digest:
        raise UsageError(
            f"the job file is damaged or was edited (its digest {format_value(declared)} is not that of"
            f" its content). {_REWRITE_HINT}"
        )
    declared = {key: value for key, value in document.items() if key not in ("format", "version", "digest")}
    try:
        job = _ADAPTER.validate_json(json.dumps(declared))
    except ValidationError as error:
        raise UsageError(f"not a valid job. {_REWRITE_HINT}", format_validation_errors(error)[:10]) from error
    planned = capabilities.find_capabilities(job.backend).list_variables(
        job.recipe.features, job.nodes, job.recipe.environment
    )
    known = {variable.name for variable in planned}
    if foreign := sorted(set(job.environment) - known):
        raise UsageError(
            f"environment: {', '.join(map(format_value, foreign))}: not known to backend {job.backend}"
        )
    return job


def _parse_and_digest_fields(data: bytes | str) -> tuple[dict[str, Any], str]:
    """Return the JSON object in a text, and the digest of its content without the digest itself."""

    def refuse_constant(number: str) -> NoReturn:
        raise ValueError(f"{number} is not a JSON number")

    try:
        document = json.loads(data, parse_constant=refuse_constant)
        if not isinstance(document, dict):
            raise UsageError("this is not a job file of mcore-bundle")
        return document, compute_short_json_digest(
            {key: value for key, value in document.items() if key != "digest"}
        )
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not JSON: {error}") from error
