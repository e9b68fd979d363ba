"""The search for the layout, micro-batch size, recomputation and offload that train a recipe fastest.

The planner decides what is legal: the rules of a recipe drop impossible layouts, and a whole plan of each
candidate says whether it runs. The roofline orders the candidates, so that only the fastest are planned.
"""

import heapq
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bundle.errors import EnvironmentUnfit, ExitCode, UsageError, format_bytes
from bundle.planning.layout import build_rank_layout, can_lay_out
from bundle.planning.memory import HEADROOM, find_device_or_host_memory
from bundle.planning.micro_batch import list_sizes
from bundle.planning.plan import Plan
from bundle.planning.problems import find_device_problems
from bundle.planning.roofline import StepTime
from bundle.recipe import Parallel, Recipe, rules
from bundle.recipe.recipe import Recompute

MOST_PLANS = 150  # of one search
CHUNKS_PER_STAGE_CHOICES = (None, 2, 4)  # of a pipeline stage
# Ways to need less memory, each slower than the one before: recomputation of no, half of the and all layers
# of a stage, and then an optimizer on the host.
KEEP_ALL, RECOMPUTE_HALF, RECOMPUTE_ALL, OFFLOAD = range(4)


class Candidate(NamedTuple):
    """A plan without problems, and the prediction of its step."""

    plan: Plan
    time: StepTime

    @property
    def predicted_tokens_per_second(self) -> float:
        """The predicted speed of all ranks together."""
        return self.plan.step_tokens / self.time.total


@dataclass
class Search:
    """The candidates of a recipe on one machine, the best first, and the number of recipes behind them."""

    limit: float | None  # bytes of a rank; None: unknown
    legal: int = 0  # layouts with a micro-batch size, which the rules accept
    planned: int = 0
    candidates: list[Candidate] = field(default_factory=list)
    refused: list[Plan] = field(default_factory=list)

    def raise_without_candidates(self, base: Plan) -> None:
        """Raise the refusal of the plan that lacks the least memory; do nothing where there is a candidate.

        Where nothing was planned, raise the violations of the recipe itself.
        """
        if self.candidates:
            return
        name = base.recipe.name
        if not self.refused:
            reasons = [f"{key}: {reason}" for key, reason in rules.find_violations(_set_machine(base))]
            raise UsageError(f"recipe {name}: no layout is allowed on {base.world} ranks", reasons)
        plan = min(self.refused, key=lambda refused: refused.fullest_rank_bytes)
        excess = 0 if self.limit is None else plan.fullest_rank_bytes - self.limit
        lack = f", {format_bytes(excess)} too much" if excess > 0 else ""
        raise (EnvironmentUnfit if plan.exit_code is ExitCode.ENVIRONMENT_UNFIT else UsageError)(
            f"recipe {name}: no layout fits {plan.world} ranks. The nearest is"
            f" {describe_layout(plan.recipe)}: its fullest rank needs"
            f" {format_bytes(plan.fullest_rank_bytes)} of {format_bytes(self.limit)}{lack}",
            [problem.text for problem in plan.problems],
        )


class _MemoryFailure(NamedTuple):
    """A recipe that lacks memory. One that divides its model as little, and saves as little, lacks it too."""

    recipe: Recipe
    saving: int
    lacks_states: bool  # weights, gradients and optimizer alone are too much

    def covers(self, recipe: Recipe, saving: int) -> bool:
        """Return whether this recipe needs at least as much memory."""
        failed, other = self.recipe.parallel, recipe.parallel
        if other.tp > failed.tp or other.ep * other.etp > failed.ep * failed.etp:
            return False
        if self.lacks_states:
            return other.pp <= failed.pp and (saving < OFFLOAD or self.saving == OFFLOAD)
        return (
            (other.pp, other.vpp) == (failed.pp, failed.vpp)
            and other.cp <= failed.cp
            and saving <= self.saving
            and recipe.train.micro_batch_size_or_one >= self.recipe.train.micro_batch_size_or_one
        )


def search_candidates(base: Plan, build: Callable[[Recipe], Plan], most: int) -> Search:
    """Return the fastest candidates for the machine of `base`, a plan that may have problems.

    `build` plans a recipe on that machine. Candidates that leave a tenth of the memory free come first.
    Raise where the devices are too few or cannot train: no layout changes that.
    """
    if problems := list(find_device_problems(base.hardware, base.per_node)):
        is_unfit = any(problem.code is ExitCode.ENVIRONMENT_UNFIT for problem in problems)
        raise (EnvironmentUnfit if is_unfit else UsageError)(
            f"recipe {base.recipe.name}: no layout can run on these devices",
            [problem.text for problem in problems],
        )
    search, tight = Search(find_device_or_host_memory(base.hardware, base.per_node)), list[Candidate]()
    most_bytes = None if search.limit is None else search.limit * (1 - HEADROOM)
    heap, counter, failures = list[Any](), itertools.count(), list[_MemoryFailure]()
    roofline = base.roofline

    def push(recipe: Recipe, saving: int) -> None:
        time = roofline.predict(recipe, build_rank_layout(recipe, base.world))
        shown = float(f"{time.total:.3g}")  # of equally fast layouts the simpler one comes first
        heapq.heappush(heap, (shown, next(counter), recipe, saving, time))

    for recipe in _list_layouts_and_batch_sizes(base):
        search.legal += 1
        push(recipe, KEEP_ALL)
    while heap and len(search.candidates) < most and search.planned < MOST_PLANS:
        _, _, recipe, saving, time = heapq.heappop(heap)
        if not any(failure.covers(recipe, saving) for failure in failures):
            search.planned += 1
            plan = build(recipe)
            if any(problem.code is not ExitCode.ENVIRONMENT_UNFIT for problem in plan.problems):
                search.refused.append(plan)
                continue
            if not plan.problems and (most_bytes is None or plan.fullest_rank_bytes <= most_bytes):
                search.candidates.append(Candidate(plan, time))
                continue
            if plan.problems:
                search.refused.append(plan)
            else:
                tight.append(Candidate(plan, time))
            states = max((stage.states.device_total for stage in plan.memory), default=0)
            failures.append(_MemoryFailure(recipe, saving, most_bytes is not None and states > most_bytes))
        if (next_recipe := _apply_memory_saving(recipe, saving + 1)) is not None:
            push(next_recipe, saving + 1)
    search.candidates = (search.candidates + tight)[:most]
    if not search.candidates and search.refused:  # the nearest may need less with its smallest micro-batch
        nearest = min(search.refused, key=lambda plan: plan.fullest_rank_bytes).recipe
        search.refused += [build(sized) for sized in itertools.islice(list_sizes(nearest, base.world), 1)]
    return search


def describe_layout(recipe: Recipe) -> str:
    """Return the layout of a recipe in words, such as "tp 2, pp 4, 2 chunks a stage, micro-batch 1"."""
    p, recompute = recipe.parallel, recipe.model.recompute
    sizes = [("tp", p.tp), ("pp", p.pp), ("cp", p.cp), ("ep", p.ep)]
    words = [f"{name} {size}" for name, size in sizes if size > 1] or ["tp 1"]
    words += [f"etp {p.etp}"] * (p.etp != p.tp) + [f"{p.vpp} chunks a stage"] * (p.vpp is not None)
    words.append(f"micro-batch {recipe.train.micro_batch_size_or_one}")
    if recompute is not None:
        is_block = recompute.method == "block"
        part = f"{recompute.layers} layers a stage" if is_block else "all layers"
        words.append(f"recompute {' and '.join(recompute.modules) or part}")
    words += ["optimizer on the host"] * recipe.optimizer.optimizer_cpu_offload
    return ", ".join(words)


def list_tuned_overrides(old: Recipe, new: Recipe) -> list[str]:
    """Return the keys that a search sets and that differ, as overrides such as "train.micro_batch_size=2"."""
    before, after = (_get_tuned_values(recipe) for recipe in (old, new))
    return [f"{key}={json.dumps(value)}" for key, value in after.items() if value != before[key]]


def _get_tuned_values(recipe: Recipe) -> dict[str, Any]:
    """Return the values of the keys that a search sets; sections without keys that are defaults."""
    values, parallel, optimizer = recipe.dump(), recipe.parallel, recipe.optimizer
    defaults, recompute = Parallel(tp=parallel.tp).dump(), values["model"]["recompute"]
    sizes = {key: size for key, size in values["parallel"].items() if size != defaults[key]}
    return {
        "devices": values["devices"],
        "parallel": {"tp": parallel.tp} | sizes,
        "train.micro_batch_size": recipe.train.micro_batch_size,
        "model.recompute": recompute and {key: value for key, value in recompute.items() if value},
        "optimizer.use_precision_aware_optimizer": optimizer.use_precision_aware_optimizer,
        "optimizer.optimizer_cpu_offload": optimizer.optimizer_cpu_offload,
    }


def _set_machine(base: Plan) -> Recipe:
    """Return the recipe with the devices that it is planned for."""
    update = {"nodes": base.nodes, "per_node": base.per_node}
    return base.recipe.with_unchecked_sections(devices=base.recipe.devices.model_copy(update=update))


def _list_layouts_and_batch_sizes(base: Plan) -> Iterator[Recipe]:
    """Yield the recipe in its own and in every other layout and micro-batch size that its rules accept."""
    recipe = _set_machine(base)
    recipe = recipe.with_unchecked_sections(
        model=recipe.model.model_copy(update={"recompute": None}),
        optimizer=recipe.optimizer.model_copy(update={"optimizer_cpu_offload": False}),
    )
    layouts = (recipe.parallel, *_list_parallel(recipe, base.world, base.per_node))
    for parallel in dict.fromkeys(layouts):
        if can_lay_out(changed := recipe.with_unchecked_sections(parallel=parallel), base.world):
            yield from list_sizes(changed, base.world)


def _list_parallel(recipe: Recipe, world: int, per_node: int) -> Iterator[Parallel]:
    """Yield sizes of the parallel groups; ranks that share a layer or a sequence stay within a node."""
    architecture = recipe.architecture
    experts = architecture.moe.num_experts if architecture.moe else 1
    for tp, pp in itertools.product(_list_divisors(per_node), _list_divisors(world)):
        for cp, ep in itertools.product(_list_divisors(per_node // tp), _list_divisors(experts)):
            for etp, vpp in itertools.product(
                {1, tp} if experts > 1 else {tp}, CHUNKS_PER_STAGE_CHOICES[: 1 + 2 * (pp > 1)]
            ):
                parallel = Parallel(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, vpp=vpp)
                if parallel.is_minimal_world_multiple(world):
                    yield from _fit_stages_to_layers(parallel, architecture.num_layers)


def _list_divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _fit_stages_to_layers(parallel: Parallel, layers: int) -> Iterator[Parallel]:
    """Yield the layout, with a shorter first and last stage where the stages cannot be equal."""
    pp, chunks = parallel.pp, parallel.vpp or 1
    middle = -(-layers // (pp * chunks)) * chunks
    rest = layers - middle * (pp - 2)
    last = rest // (2 * chunks) * chunks
    ends = {"num_layers_in_first_pipeline_stage": rest - last, "num_layers_in_last_pipeline_stage": last}
    if layers % (pp * chunks) == 0:
        yield parallel
    elif last > 0:
        yield parallel.model_copy(update=ends)


def _apply_memory_saving(recipe: Recipe, saving: int) -> Recipe | None:
    """Return the recipe with a way to save memory; None where there is none, or the rules refuse it."""
    if saving > OFFLOAD:
        return None
    architecture = recipe.architecture
    stages = recipe.parallel.compute_stages(architecture.num_layers, architecture.mtp_layers) or ()
    layers = max(sum(chunk.layers for chunk in stage) for stage in stages)
    recompute = Recompute(granularity="full", method="uniform", layers=1)
    if saving == RECOMPUTE_HALF:
        recompute = Recompute(granularity="full", method="block", layers=-(-layers // 2))
    optimizer = recipe.optimizer
    if saving == OFFLOAD:
        update = {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True}
        optimizer = optimizer.model_copy(update=update)
    model = recipe.model.model_copy(update={"recompute": recompute})
    changed = recipe.with_unchecked_sections(model=model, optimizer=optimizer)
    return None if rules.find_violations(changed) else changed
