"""The choice of `train.micro_batch_size: auto`: the fastest size by the roofline among those that fit."""

from collections.abc import Iterator
from typing import NamedTuple

from bundle.capabilities import LayerTraits
from bundle.environment.packages import MegatronCode
from bundle.errors import format_bytes
from bundle.planning.layout import RankLayout, build_rank_layout
from bundle.planning.memory import HEADROOM, estimate_memory
from bundle.planning.roofline import Roofline
from bundle.recipe import Recipe, rules

# The largest micro-batch that was measured on an H200: 8 rows of 4,096 tokens.
MOST_TOKENS = 32768
# The least gain that is worth a note about a larger size, as a share of the time of a step.
LEAST_ADVISED_GAIN = 0.05


class SizedRecipe(NamedTuple):
    """A recipe with one size, its layout, and the predicted seconds of its step."""

    seconds: float
    recipe: Recipe
    layout: RankLayout

    @property
    def size(self) -> int:
        """The micro-batch size."""
        return self.recipe.train.micro_batch_size_or_one


def list_sizes(recipe: Recipe, world: int) -> Iterator[Recipe]:
    """Yield the recipe with every micro-batch size that its rules and `world` ranks accept, from 1 on."""
    batch = recipe.train.global_batch_size // recipe.parallel.compute_dp(world)
    most = max(1, min(batch, MOST_TOKENS // recipe.data.sequence_length))
    for size in (size for size in range(1, most + 1) if batch % size == 0):
        sized = recipe.with_unchecked_sections(
            train=recipe.train.model_copy(update={"micro_batch_size": size})
        )
        if not sized.find_layout_violations(world) and not rules.find_violations(sized):
            yield sized


class SizeChooser(NamedTuple):
    """What the choice of a size is made from: the ways to predict a step and its memory."""

    roofline: Roofline
    traits: LayerTraits
    code: MegatronCode
    device: float | None  # bytes that a rank has; None: unknown

    def choose_fastest(self, recipe: Recipe, layout: RankLayout) -> tuple[SizedRecipe, str]:
        """Return the fastest size that fits, else the smallest one, and a note with the reason."""
        sized = self._list_sizes_by_speed(recipe, layout.world)
        best = next(filter(self._fits, sized), None) or min(sized, key=lambda entry: entry.size)
        needed = format_bytes(self._estimate_peak_bytes(best))
        reason = f"predicted{self.roofline.assumed_device_note}: {best.seconds:.3g} s a step, {needed} of"
        reason += f" {format_bytes(self.device)}"
        if sized[0] is not best:
            larger = format_bytes(self._estimate_peak_bytes(sized[0]))
            reason += f"; {sized[0].size} is predicted to be faster, but needs {larger}: auto leaves"
            reason += f" {HEADROOM:.0%} of the memory free"
        elif len(sized) > 1:
            reason += f"; the fastest of {', '.join(map(str, sorted(entry.size for entry in sized)))}"
        else:
            reason += "; the only size that this job accepts"
        return best, f"train.micro_batch_size: auto is {best.size} ({reason})"

    def advise(self, recipe: Recipe, layout: RankLayout) -> str | None:
        """Return a note about a larger size that fits and is faster; None where the recipe's is as good."""
        size, now = recipe.train.micro_batch_size_or_one, self.roofline.predict(recipe, layout).total
        if recipe.data.packed or self.device is None:
            return None
        for entry in self._list_sizes_by_speed(recipe, layout.world):
            if entry.seconds > now * (1 - LEAST_ADVISED_GAIN):
                break
            if entry.size > size and self._fits(entry):
                needed = f"{format_bytes(self._estimate_peak_bytes(entry))} of {format_bytes(self.device)}"
                return (
                    f"train.micro_batch_size: {entry.size} fits as well ({needed}) and is predicted to be"
                    f" {now / entry.seconds:.2f} times as fast as {size}"
                )
        return None

    def _list_sizes_by_speed(self, recipe: Recipe, world: int) -> list[SizedRecipe]:
        """Return every size, the fastest first."""
        sized = []
        for sized_recipe in list_sizes(recipe, world):
            layout = build_rank_layout(sized_recipe, world)
            seconds = self.roofline.predict(sized_recipe, layout).total
            sized.append(SizedRecipe(seconds, sized_recipe, layout))
        return sorted(sized, key=lambda entry: entry.seconds)

    def _estimate_peak_bytes(self, entry: SizedRecipe) -> int:
        stages = estimate_memory(entry.recipe, entry.layout, self.traits, self.code)
        return max(stage.peak_bytes for stage in stages)

    def _fits(self, entry: SizedRecipe) -> bool:
        return self.device is None or self._estimate_peak_bytes(entry) <= self.device * (1 - HEADROOM)
