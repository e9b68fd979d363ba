"""The plan as JSON values, for programs."""

from typing import Any

from bundle.hardware import plain
from bundle.planning.capacity import Stage
from bundle.planning.placement import Placement
from bundle.planning.plan import Plan
from bundle.recipe import Recipe

SCHEMA = 1


def document(plan: Plan, run: str, starts: str) -> dict[str, Any]:
    """The plan, with the command that runs it and what that starts on the first node."""
    return {
        "schema": SCHEMA,
        "recipe": plan.recipe.dump(),
        "hardware": plain(plan.hardware),
        "megatron": plain(plan.target),
        "layout": {
            "nodes": plan.nodes,
            "per_node": plan.per_node,
            "world": plan.world,
            **(_layout(plan.placement) if plan.placement else {}),
        },
        "balancing": _balancing(plan.recipe),
        "stages": [_stage(stage) for stage in plan.stages],
        "attention": plain(plan.attention),
        "patches": [plain(decision) for decision in plan.decisions],
        "environment": [
            {"name": variable.name, "value": variable.value, "why": variable.why}
            for variable in plan.environment
        ],
        "run": run,
        "starts": starts,
        "notes": list(plan.notes),
        "problems": [{"code": int(problem.code), "text": problem.text} for problem in plan.problems],
        "exit_code": int(plan.code),
    }


def _layout(placement: Placement) -> dict[str, Any]:
    return {
        "microbatches": placement.microbatches,
        "axes": {
            axis.name: {"size": axis.size, "stride": axis.stride, "first_group": list(axis.group(0))}
            for axis in placement.axes
        },
    }


def _balancing(recipe: Recipe) -> dict[str, Any] | None:
    """How experts are balanced; None where there are none."""
    moe, chosen = recipe.architecture.moe, recipe.model.moe
    if moe is None:
        return None
    return {
        "aux_loss_coeff": moe.aux_loss_coeff,
        "over": "sequence" if moe.aux_loss_per_sequence else "micro-batch",
        "z_loss_coeff": chosen.z_loss_coeff,
        "bias_update_rate": chosen.bias_update_rate if moe.expert_bias else None,
    }


def _stage(stage: Stage) -> dict[str, Any]:
    return {
        "index": stage.index,
        "chunks": plain(stage.chunks),
        "bytes": {
            **plain(stage.states),
            "activations_held": stage.activations.held,
            "activations_passing": stage.activations.passing,
            "total": stage.total,
        },
        "in_flight": list(stage.activations.in_flight),
    }
