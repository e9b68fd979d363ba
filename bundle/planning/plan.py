"""The plan: everything that a job will be, and every reason why it cannot be that."""

from collections.abc import Sequence
from pathlib import Path

from packaging.version import Version

from bundle.capabilities import Capabilities, Choice, Variable
from bundle.errors import ExitCode
from bundle.frozen import frozen
from bundle.hardware import Hardware
from bundle.patches import Action, Decision
from bundle.planning.activations import activations
from bundle.planning.capacity import Stage, devices_problems, memory_note, memory_problems
from bundle.planning.code import Code
from bundle.planning.placement import Placement, place
from bundle.planning.problem import Problem, recipe_problem
from bundle.planning.refusals import refusals
from bundle.planning.states import Ledger
from bundle.recipe import Recipe

# The gravest first: a recipe has to be changed before a machine is worth looking for.
_ORDER = (ExitCode.USAGE, ExitCode.ENVIRONMENT_UNFIT, ExitCode.PATCHES)


@frozen
class Target:
    """The megatron-core that is planned for: its version, and where that was read."""

    version: str
    origin: str

    @property
    def release(self) -> Version:
        """The release number alone, by which releases are compared."""
        return Version(Version(self.version).base_version)


@frozen
class Plan:
    """All that will happen. `placement` is None, and `stages` empty, where the ranks cannot be laid out."""

    recipe: Recipe
    hardware: Hardware
    target: Target
    nodes: int
    per_node: int
    placement: Placement | None
    stages: tuple[Stage, ...]
    attention: Choice
    decisions: tuple[Decision, ...]
    environment: tuple[Variable, ...]
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.nodes * self.per_node

    @property
    def code(self) -> ExitCode:
        """What a command that was asked to run this should end with."""
        codes = {problem.code for problem in self.problems}
        return next((code for code in _ORDER if code in codes), ExitCode.OK)


def make(
    recipe: Recipe,
    hardware: Hardware,
    can: Capabilities,
    target: Target,
    decisions: Sequence[Decision],
    *,
    nodes: int | None = None,
    per_node: int | None = None,
    notes: Sequence[str] = (),
    beside: Sequence[Problem] = (),
    root: Path | None = None,
) -> Plan:
    """The plan for a recipe on a machine, with every problem in it; `nodes` and `per_node` override the
    recipe, `beside` are problems that somebody else found, `root` is the tree of the target, if there is one.
    """
    code = Code(target.release, root)
    nodes = nodes or recipe.devices.nodes
    per_node = per_node or recipe.devices.per_node or _all_devices(recipe, hardware, nodes)
    violations = recipe.layout_violations(nodes * per_node)
    placement = None if violations else place(recipe, nodes * per_node)
    stages = () if placement is None else _stages(recipe, placement, can, code)
    patches = {decision.id for decision in decisions if decision.action is Action.APPLY}
    tight = memory_note(stages, hardware.device_memory)
    problems = (
        *beside,
        *map(recipe_problem, violations),
        *refusals(recipe, can, hardware, code, placement, patches),
        *_stopping(decisions),
        *devices_problems(hardware, per_node),
        *memory_problems(stages, hardware, per_node),
    )
    return Plan(
        recipe=recipe,
        hardware=hardware,
        target=target,
        nodes=nodes,
        per_node=per_node,
        placement=placement,
        stages=stages,
        attention=can.attention(recipe, hardware.generation.value),
        decisions=tuple(decisions),
        environment=can.variables(recipe.features),
        notes=(*notes, *hardware.notes, *([tight] if tight else [])),
        problems=tuple(sorted(problems, key=lambda problem: _ORDER.index(problem.code))),
    )


def _all_devices(recipe: Recipe, hardware: Hardware, nodes: int) -> int:
    """All devices of a node; on the cpu, the fewest ranks that fit the layout."""
    if hardware.backend == "cpu":
        return -(-recipe.parallel.minimal_world // nodes)
    return len(hardware.devices)


def _stages(recipe: Recipe, placement: Placement, can: Capabilities, code: Code) -> tuple[Stage, ...]:
    ledger = Ledger.of(recipe, placement, code, can.layers)
    return tuple(
        Stage(
            index=index,
            chunks=chunks,
            states=ledger.largest(index),
            activations=activations(recipe, placement, index, can.layers, code),
        )
        for index, chunks in enumerate(placement.stages)
    )


def _stopping(decisions: Sequence[Decision]) -> list[Problem]:
    """A known trap is the recipe's problem, a patch that cannot be applied is its own."""
    return [
        recipe_problem(f"{decision.id}: {decision.reason}")
        if decision.action is Action.TRAP
        else Problem(ExitCode.PATCHES, f"{decision.id}: {decision.action}: {decision.reason}")
        for decision in decisions
        if decision.stops
    ]
