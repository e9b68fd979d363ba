"""The layout of a recipe: how many ranks share what, and which world sizes fit."""

import math
from typing import Any

from bundle.frozen import frozen
from bundle.recipe.section import Count, key, section


@frozen
class Layout:
    """What follows from a world size: data-parallel sizes and micro-batches of a step."""

    world: int
    dp: int
    expert_dp: int
    microbatches: int


@section
class Parallel:
    """Sizes of the parallel groups: pp x dp x cp x tp ranks, for experts pp x expert dp x ep x etp."""

    tp: Count = key(default=1, description="Tensor parallel size.")
    pp: Count = key(default=1, description="Pipeline stages.")
    vpp: Count | None = key(
        default=None, description="Model chunks per pipeline stage (interleaved); null: 1."
    )
    cp: Count = key(default=1, description="Context parallel size: ranks that share one sequence.")
    ep: Count = key(default=1, description="Expert parallel size: ranks that divide the experts.")
    etp: Count = key(default=1, description="Tensor parallel size of experts; null or left out: tp.")
    sequence_parallel: bool = key(
        default=False, description="Divide activations between tp ranks; null or left out: tp > 1."
    )

    @staticmethod
    def complete(given: Any) -> Any:
        """Experts and sequences are divided like everything else where nobody says."""
        if not isinstance(given, dict):
            return given
        tp = given.get("tp", 1)
        followers = {"etp": tp, "sequence_parallel": isinstance(tp, int) and tp > 1}
        return given | {name: value for name, value in followers.items() if given.get(name) is None}

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of everything but the experts: tp x cp x pp."""
        return self.tp * self.cp * self.pp

    @property
    def minimal_world(self) -> int:
        """The smallest number of ranks that fits: both tp x cp and etp x ep divide the ranks of a stage."""
        return self.pp * math.lcm(self.tp * self.cp, self.etp * self.ep)

    def fits(self, world: int) -> bool:
        """Whether `world` ranks can be laid out."""
        return world > 0 and world % self.minimal_world == 0

    def dp(self, world: int) -> int:
        """The data-parallel size of `world` ranks; the caller has asked `fits`."""
        return world // self.model_ranks

    def expert_dp(self, world: int) -> int:
        """How many copies of each expert `world` ranks hold; the caller has asked `fits`."""
        return world // (self.pp * self.etp * self.ep)
