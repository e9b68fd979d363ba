"""The job file as one frozen value."""

from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from bundle.architectures import Architecture, from_config
from bundle.errors import UsageError
from bundle.recipe.features import features
from bundle.recipe.model import Model
from bundle.recipe.parallel import Layout, Parallel
from bundle.recipe.section import key, plain, section
from bundle.recipe.sections import (
    MOST_RANKS,
    Checkpoint,
    Data,
    Devices,
    Distributed,
    Metrics,
    Optimizer,
    Train,
)
from bundle.sequences.alignment import Alignment


@section
class Recipe:
    """Everything a job is asked to do. `bundle.recipe.load` makes it and checks the rules."""

    name: str = key(
        pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$",
        description="Names the run directory and the job; lower-case letters, digits, dots and dashes.",
    )
    task: Literal["pretrain", "sft"] = key(
        default="pretrain", description="Learn every token, or only the responses."
    )
    backend: Literal["auto", "cpu", "cuda", "ascend"] = key(
        default="auto", description="The accelerator; auto: what the machine has."
    )
    seed: int = key(
        default=1234, ge=0, le=2**31 - 1, description="Of the initial weights, the data order and dropout."
    )
    devices: Devices = key(default_factory=Devices, description="How many devices the job takes.")
    model: Model = key(description="What is trained.")
    parallel: Parallel = key(default_factory=Parallel, description="Sizes of the parallel groups.")
    data: Data = key(description="What is trained on.")
    train: Train = key(description="How long and in which portions.")
    optimizer: Optimizer = key(default_factory=Optimizer, description="The optimizer and its schedule.")
    distributed: Distributed = key(
        default_factory=Distributed, description="How ranks exchange gradients and weights."
    )
    checkpoint: Checkpoint = key(
        default_factory=Checkpoint, description="When to save, and how much to keep."
    )
    metrics: Metrics = key(default_factory=Metrics, description="Where numbers go.")

    @cached_property
    def architecture(self) -> Architecture:
        """The model's dimensions, with as many MTP layers, balanced as this job trains them."""
        read = from_config(self.model.config, "model.config")
        layers, balancing = self.model.mtp.layers, self.model.moe.aux_loss_coeff
        if layers is not None:
            read = replace(read, mtp_layers=layers)
        if read.moe is not None and balancing is not None:
            read = replace(read, moe=replace(read.moe, aux_loss_coeff=balancing, unused_aux_loss_coeff=0.0))
        return read

    @cached_property
    def alignment(self) -> Alignment:
        """The multiples that this job's sequences are padded to, and that its lengths must be."""
        parallel, fp8 = self.parallel, self.model.fp8
        return Alignment(
            "thd" if self.data.packed else "bshd",
            tp=parallel.tp,
            cp=parallel.cp,
            sequence_parallel=parallel.sequence_parallel,
            scaling=fp8.scaling if fp8 else None,
        )

    @cached_property
    def features(self) -> frozenset[str]:
        """Names of the parts of megatron-core that this job uses; patches and traps ask for them."""
        return features(self)

    def layout(self, world: int) -> Layout:
        """How `world` ranks share the work. Raises UsageError with every reason why they cannot."""
        if violations := self.layout_violations(world):
            raise UsageError(f"recipe {self.name} does not fit {world} ranks", violations)
        dp = self.parallel.dp(world)
        microbatches = self.train.global_batch_size // (self.train.micro_batch_size * dp)
        return Layout(world, dp, self.parallel.expert_dp(world), microbatches)

    def layout_violations(self, world: int) -> list[str]:
        """Every reason why `world` ranks cannot run this recipe; empty when they can."""
        parallel, train = self.parallel, self.train
        if world > MOST_RANKS:
            return [f"devices: {world} ranks are more than the {MOST_RANKS} that a plan is made for"]
        if not parallel.fits(world):
            least = parallel.minimal_world
            return [f"parallel: this layout needs a multiple of {least} ranks, {world} is none"]
        portion = train.micro_batch_size * parallel.dp(world)
        if train.global_batch_size % portion:
            return [
                f"train.global_batch_size: {train.global_batch_size} is not a multiple of "
                f"micro_batch_size x dp = {train.micro_batch_size} x {parallel.dp(world)}"
            ]
        microbatches = train.global_batch_size // portion
        if parallel.vpp is not None and microbatches % parallel.pp:
            return [
                f"train.global_batch_size: gives {microbatches} micro-batches; an interleaved pipeline "
                f"needs a multiple of pp {parallel.pp}"
            ]
        return []

    def dump(self) -> dict[str, Any]:
        """The resolved recipe as plain JSON values, every key present; loads to an equal Recipe."""
        return dict(plain(self))
