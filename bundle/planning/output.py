"""A plan as it is shown: JSON values for programs, text for people."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bundle import capabilities
from bundle.environment.machine import plain
from bundle.errors import bytes_shown
from bundle.patches import Action
from bundle.planning.layout import Chunk, RankLayout
from bundle.planning.memory import MemoryEstimate
from bundle.planning.plan import Plan
from bundle.planning.size import Disk, ModelSize
from bundle.recipe import Recipe
from bundle.recipe.completion import describe

SCHEMA = 1
_WIDTH = 13


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan, but for the commands that run it."""
    return {
        "schema": SCHEMA,
        "recipe": plan.recipe.dump(),
        "hardware": plain(plan.hardware),
        "megatron": plain(plan.target),
        "layout": {
            "nodes": plan.nodes,
            "per_node": plan.per_node,
            "world": plan.world,
            **(_axes(plan.layout) if plan.layout else {}),
        },
        "model": {
            "parameters": plan.size.parameters,
            "active_parameters": plan.size.active,
            "mtp_parameters": plan.size.mtp,
        },
        "weights": plan.weights or None,
        "settings": settings_json(plan.recipe),
        "step": {"tokens": plan.step_tokens, "flops": plan.step_flops, "peak": plain(plan.peak)},
        "checkpoint": {"bytes": plan.checkpoint_bytes},
        "export": {"bytes": plan.export_bytes} if plan.export_bytes else None,
        "balancing": _balancing_json(plan.recipe),
        "stages": [_stage(chunks, memory) for chunks, memory in _stages(plan)],
        "attention": plain(plan.attention),
        "patches": [plain(decision) for decision in plan.patches.decisions],
        "environment": [
            {"name": variable.name, "value": variable.value, "why": variable.why}
            for variable in plan.environment
        ],
        "notes": list(plan.notes),
        "problems": [{"code": int(problem.code), "text": problem.text} for problem in plan.problems],
        "exit_code": int(plan.code),
    }


def _axes(layout: RankLayout) -> dict[str, Any]:
    return {
        "microbatches": layout.microbatches,
        "bubble": layout.bubble,
        "axes": {
            axis.name: {"size": axis.size, "stride": axis.stride, "first_group": list(axis.group(0))}
            for axis in layout.axes
        },
    }


def _balancing_json(recipe: Recipe) -> dict[str, Any] | None:
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


def _stages(plan: Plan) -> Iterator[tuple[tuple[Chunk, ...], MemoryEstimate]]:
    """What each pipeline stage holds, and its memory."""
    return zip(plan.layout.stages if plan.layout else (), plan.memory, strict=True)


def _stage(chunks: tuple[Chunk, ...], memory: MemoryEstimate) -> dict[str, Any]:
    return {
        "index": memory.stage,
        "chunks": plain(chunks),
        "bytes": {
            **plain(memory.states),
            "activations_held": memory.activations.held,
            "activations_passing": memory.activations.passing,
            "total": memory.total,
        },
        "in_flight": list(memory.activations.in_flight),
    }


def to_text(plan: Plan, run: str, starts: str) -> str:
    """The plan in sections; the problems come last, where they are read."""
    sections: list[tuple[str, list[str]]] = [
        ("job", [f"{plan.recipe.name}: {plan.recipe.task} on {plan.hardware.backend}"]),
        ("model", [_model(plan.size)]),
        ("weights", [plan.weights] if plan.weights else []),
        ("hardware", [plan.hardware.reason]),
        ("megatron", [f"megatron-core {plan.target.version} ({plan.target.origin})"]),
        ("attention", list(_attention(plan))),
        ("operators", list(_operators(plan))),
        ("layout", list(_layout(plan))),
        ("length", [_length(plan)]),
        ("settings", settings_lines(plan.recipe)),
        ("validation", [_validation(plan.recipe)]),
        ("step", [_step(plan), *_bubble(plan.layout)]),
        ("experts", list(_experts(plan.recipe))),
        ("stages", [f"{of.stage}: {'; '.join(map(_chunk, chunks))}" for chunks, of in _stages(plan)]),
        ("memory", list(_memory(plan))),
        ("checkpoint", [_checkpoint(plan)]),
        ("export", list(_export(plan))),
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


def _validation(recipe: Recipe) -> str:
    """What is evaluated on."""
    share, named = recipe.data.validation, ", ".join(recipe.data.validation_sets)
    held = f"{100 * share:g} % of the data is held out (data.validation)" if share else "no data is held out"
    return f"{held}; data.validation_sets: {named}" if named else held


def _attention(plan: Plan) -> Iterator[str]:
    yield f"{plan.attention.value}: {plan.attention.why}"
    kernels = {one.name: one for one in capabilities.of(plan.hardware.backend, plan.recipe.features).kernels}
    kernel, parallel = kernels.get(plan.attention.value), plan.recipe.parallel
    if plan.recipe.data.packed and kernel is not None and (most := kernel.most_in_a_pack(parallel.cp)):
        yield f"a pack holds at most {most:,} sequences ({kernel.what})"


def _operators(plan: Plan) -> Iterator[str]:
    can = capabilities.of(plan.hardware.backend, plan.recipe.features)
    for operator in can.operators_of(plan.recipe):
        chosen = can.computes(plan.recipe, operator.name)
        left_out = "torch's own, since model.operators leaves it out"
        yield f"{operator.name}: {f'{operator.what}: {operator.why}' if chosen else left_out}"


def _model(size: ModelSize) -> str:
    active = f", {_decimal(size.active, 'KMBT')} active" if size.active < size.parameters else ""
    mtp = f"; {_decimal(size.mtp, 'KMBT')} more in MTP layers" if size.mtp else ""
    trained = f"; {_decimal(size.adapters, 'KMBT')} of adapters are trained" if size.adapters else ""
    frozen = f"; {_decimal(size.frozen, 'KMBT')} of the vision tower are frozen" if size.frozen else ""
    return f"{_decimal(size.parameters, 'KMBT')} parameters{active}{mtp}{trained}{frozen}"


def _step(plan: Plan) -> str:
    """Tokens and work of a step, and how long it takes at least where that can be said."""
    work = f"up to {plan.step_tokens:,} tokens, {_decimal(plan.step_flops, 'KMGTPEZY')}FLOPs"
    work += " beside the vision tower's" if plan.recipe.architecture.vision else ""
    if plan.peak is None or plan.recipe.model.dtype != "bf16" or plan.recipe.model.fp8 is not None:
        return work
    seconds = plan.step_flops / (plan.world * plan.peak.bf16)
    shown = f"{seconds:,.0f}" if seconds >= 10 else f"{seconds:.2g}"
    return f"{work}: {shown} s at the devices' peak of {_decimal(plan.peak.bf16, 'KMGTPEZY')}FLOP/s"


def _bubble(layout: RankLayout | None) -> Iterator[str]:
    if layout is not None and layout.size("pp") > 1:
        schedule = "1F1B" if len(layout.stages[0]) == 1 else "interleaved 1F1B"
        yield f"pipeline bubble: stages wait {layout.bubble:.0%} of a step ({schedule}, even stages)"


def _length(plan: Plan) -> str:
    """How long the job is, as far as that is known before its data is read."""
    train = plan.recipe.train
    if train.epochs is not None:
        return f"{train.epochs:g} epochs: `check` tokenises the data, and then says how many steps they are"
    return f"{train.steps:,} steps, {train.steps * train.global_batch_size:,} samples"


def _checkpoint(plan: Plan) -> str:
    size, keep = plan.checkpoint_bytes, plan.recipe.checkpoint.keep
    whole = bytes_shown(size * plan.recipe.checkpoint.most)
    return f"{bytes_shown(size)}, of which {keep} stay and one more is written: {whole} of disk"


def settings_json(recipe: Recipe) -> list[dict[str, Any]]:
    """Return the settings that decide how a recipe trains, and where each comes from."""
    return [plain(setting) for setting in describe(recipe.dump(), recipe.origins)]


def settings_lines(recipe: Recipe) -> list[str]:
    """Return the same for people, a line for each."""
    settings = list(describe(recipe.dump(), recipe.origins))
    width = max(len(setting.key) for setting in settings)
    return [f"{each.key:<{width}}  {_plain_value(each.value)}  ({each.origin})" for each in settings]


def _plain_value(value: Any) -> str:
    """Return a value as a recipe has it."""
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value


def _export(plan: Plan) -> Iterator[str]:
    """What the run writes for others, if anything."""
    kept, train = plan.recipe.checkpoint, plan.recipe.train
    if kept.export is None:
        return
    most = "at most " if kept.export == "hf-fp8" else ""
    each = f"{kept.export}, {most}{bytes_shown(plan.export_bytes)}"
    if not kept.export_interval:
        yield f"{each}, at the end"
        return
    count = "" if train.epochs is not None else f": {kept.exports(train.steps):,} of them, which all stay"
    yield f"{each}, every {kept.export_interval:,} steps and at the end{count}"


def disk_shown(room: Disk, directory: Path) -> str:
    """What a run leaves on the disk where it lives, and whether that has the room."""
    needed = f"{bytes_shown(room.checkpoints)} of checkpoints, {bytes_shown(room.checkpoint)} each"
    if room.exports:
        needed += f", {bytes_shown(room.exports)} of exports"
    if room.there:
        needed += f", {bytes_shown(room.there)} of it there"
    short = "" if room.suffices else ": NOT ENOUGH, free some, lower checkpoint.keep, or name --run-directory"
    return f"{needed}; {bytes_shown(room.free)} free for {directory}{short}"


def _decimal(amount: float, prefixes: str) -> str:
    """A number for people, by thousands: 30.5 B, 12.0 T; the prefix stands last."""
    power = 0
    while amount >= 999.95 and power < len(prefixes):
        amount, power = amount / 1000, power + 1
    return f"{amount:.1f} {prefixes[power - 1]}" if power else f"{amount:.0f} "


def _layout(plan: Plan) -> Iterator[str]:
    nodes = "1 node" if plan.nodes == 1 else f"{plan.nodes} nodes x {plan.per_node}"
    yield f"{plan.world} ranks on {nodes}"
    if plan.layout is None:
        return
    train, data = plan.recipe.train, plan.recipe.data
    count, rows = plan.layout.microbatches, plan.recipe.rows
    if count * train.micro_batch_size * plan.layout.size("dp") == train.global_batch_size:
        batches = "1 micro-batch" if count == 1 else f"{count} micro-batches"
        yield f"{batches} a step of {rows} x {data.sequence_length} tokens on every data-parallel rank"
    experts = plan.recipe.architecture.moe is not None
    for axis in plan.layout.axes:
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


def _chunk(chunk: Chunk) -> str:
    parts = ["embedding"] if chunk.embedding else ["embedding (copy for MTP)"] if chunk.embedding_copy else []
    if chunk.layers:
        first, last = chunk.layers[0], chunk.layers[-1]
        parts.append(f"layer {first}" if first == last else f"layers {first}-{last}")
    if chunk.mtp_layers:
        parts.append(f"{chunk.mtp_layers} MTP layer{'s' if chunk.mtp_layers > 1 else ''}")
    return ", ".join([*parts, "head"] if chunk.head else parts)


def _memory(plan: Plan) -> Iterator[str]:
    """One line per stage: what its fullest rank needs."""
    for stage in plan.memory:
        states, flying = stage.states, stage.activations
        parts = [
            f"weights {bytes_shown(states.parameters)}",
            *([f"their FP8 copies {bytes_shown(states.quantized)}"] if states.quantized else []),
            f"gradients {bytes_shown(states.gradients)}",
            f"optimizer {bytes_shown(states.master + states.moments + states.counters)}",
            f"activations {bytes_shown(flying.held)} ({max(flying.in_flight)} in flight)",
            f"passing {bytes_shown(flying.passing)}",
        ]
        if states.host:
            parts.append(f"and on the host {bytes_shown(states.host)}")
        yield f"{stage.stage}: {bytes_shown(stage.total)} = {', '.join(parts)}"
    size = plan.hardware.device_memory
    if plan.memory and size.value is not None:
        worst = max(stage.total for stage in plan.memory)
        yield f"fullest rank: {worst / size.value:.0%} of {bytes_shown(size.value)} ({size.reason})"


def _patches(plan: Plan) -> Iterator[str]:
    silent = (Action.SKIP,)
    for decision in plan.patches.decisions:
        if decision.action not in silent:
            unproven = "" if decision.proven else " (unproven)"
            yield f"{decision.action} {decision.id}{unproven}: {decision.reason}"
    skipped = sum(decision.action in silent for decision in plan.patches.decisions)
    if skipped:
        yield f"{skipped} not needed"
