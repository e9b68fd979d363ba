"""The plan as text, for people."""

from collections.abc import Iterator

from bundle.patches import Action
from bundle.planning.capacity import Stage, shown
from bundle.planning.placement import Chunk
from bundle.planning.plan import Plan
from bundle.recipe import Recipe

_WIDTH = 13


def text(plan: Plan, run: str, starts: str) -> str:
    """The plan in sections; the problems come last, where they are read."""
    sections: list[tuple[str, list[str]]] = [
        ("job", [f"{plan.recipe.name}: {plan.recipe.task} on {plan.hardware.backend}"]),
        ("hardware", [plan.hardware.reason]),
        ("megatron", [f"megatron-core {plan.target.version} ({plan.target.origin})"]),
        ("attention", [f"{plan.attention.value}: {plan.attention.why}"]),
        ("layout", list(_layout(plan))),
        ("experts", list(_experts(plan.recipe))),
        ("stages", [_holds(stage) for stage in plan.stages]),
        ("memory", list(_memory(plan))),
        ("patches", list(_patches(plan))),
        ("environment", [f"{each.name}={each.value or repr('')}  {each.why}" for each in plan.environment]),
        ("run", [run] if run else []),
        ("starts", starts.splitlines()),
        ("notes", list(plan.notes)),
        ("problems", [f"{problem.text} (exit {int(problem.code)})" for problem in plan.problems]),
    ]
    lines = [
        f"{name if first else '':<{_WIDTH}}{line}"
        for name, body in sections
        for first, line in ((index == 0, line) for index, line in enumerate(body))
    ]
    return "\n".join(lines)


def _layout(plan: Plan) -> Iterator[str]:
    nodes = "1 node" if plan.nodes == 1 else f"{plan.nodes} nodes x {plan.per_node}"
    yield f"{plan.world} ranks on {nodes}"
    if plan.placement is None:
        return
    train, data = plan.recipe.train, plan.recipe.data
    count, rows = plan.placement.microbatches, train.micro_batch_size
    batches = "1 micro-batch" if count == 1 else f"{count} micro-batches"
    yield f"{batches} a step of {rows} x {data.sequence_length} tokens on every data-parallel rank"
    experts = plan.recipe.architecture.moe is not None
    for axis in plan.placement.axes:
        if axis.size > 1 and (experts or axis.name in ("tp", "cp", "dp", "pp")):
            group = axis.group(0)
            ranks = " ".join(map(str, group[:8])) + (" ..." if len(group) > 8 else "")
            yield f"{axis.name} {axis.size}: ranks {ranks}"


def _experts(recipe: Recipe) -> Iterator[str]:
    """How experts are balanced, where there are any."""
    moe, chosen = recipe.architecture.moe, recipe.model.moe
    if moe is None:
        return
    if moe.aux_loss_coeff:
        of = "sequence" if moe.aux_loss_per_sequence else "micro-batch"
        yield f"balancing loss {moe.aux_loss_coeff:g} over each {of}"
    elif moe.unused_aux_loss_coeff:
        yield (
            f"no balancing loss: router_aux_loss_coef {moe.unused_aux_loss_coeff:g} counts only with"
            " output_router_logits true, or as model.moe.aux_loss_coeff"
        )
    else:
        yield "no balancing loss"
    if chosen.z_loss_coeff:
        yield f"z-loss {chosen.z_loss_coeff:g}"
    if moe.expert_bias:
        yield f"steering bias moves by {chosen.bias_update_rate:g} a step"


def _holds(stage: Stage) -> str:
    return f"{stage.index}: " + "; ".join(_chunk(chunk) for chunk in stage.chunks)


def _chunk(chunk: Chunk) -> str:
    parts = ["embedding"] if chunk.embedding else ["embedding (copy for MTP)"] if chunk.embedding_copy else []
    first, last = chunk.layers[0], chunk.layers[-1]
    parts.append(f"layer {first}" if first == last else f"layers {first}-{last}")
    if chunk.mtp_layers:
        parts.append(f"{chunk.mtp_layers} MTP layer{'s' if chunk.mtp_layers > 1 else ''}")
    return ", ".join([*parts, "head"] if chunk.head else parts)


def _memory(plan: Plan) -> Iterator[str]:
    """One line per stage: what its fullest rank needs."""
    for stage in plan.stages:
        states, flying = stage.states, stage.activations
        parts = [
            f"weights {shown(states.parameters)}",
            f"gradients {shown(states.gradients)}",
            f"optimizer {shown(states.master + states.moments + states.counters)}",
            f"activations {shown(flying.held)} ({max(flying.in_flight)} in flight)",
            f"passing {shown(flying.passing)}",
        ]
        yield f"{stage.index}: {shown(stage.total)} = {', '.join(parts)}"
    size = plan.hardware.device_memory
    if plan.stages and size.value is not None:
        worst = max(stage.total for stage in plan.stages)
        yield f"fullest rank: {worst / size.value:.0%} of {shown(size.value)} ({size.reason})"


def _patches(plan: Plan) -> Iterator[str]:
    silent = (Action.SKIP,)
    for decision in plan.decisions:
        if decision.action not in silent:
            unproven = "" if decision.proven else " (unproven)"
            yield f"{decision.action} {decision.id}{unproven}: {decision.reason}"
    skipped = sum(decision.action in silent for decision in plan.decisions)
    if skipped:
        yield f"{skipped} not needed"
