"""A plan as JSON values for programs and as text for people."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bundle import capabilities
from bundle.environment.machine import to_json_value
from bundle.errors import format_bytes
from bundle.patches import PatchAction
from bundle.planning.layout import ModelChunk, RankLayout
from bundle.planning.memory import MemoryEstimate
from bundle.planning.plan import Plan
from bundle.planning.size import DiskUsage, ParametersAndForwardFlops
from bundle.recipe import Recipe
from bundle.recipe.completion import list_shown_settings
from bundle.recipe.loss_chunks import choose_loss_chunks, count_microbatch_tokens

SCHEMA_VERSION = 1
_LABEL_WIDTH = 13


def to_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON values, without the commands that run it."""
    return {
        "schema": SCHEMA_VERSION,
        "recipe": plan.recipe.dump(),
        "hardware": to_json_value(plan.hardware),
        "megatron": to_json_value(plan.megatron),
        "layout": {
            "nodes": plan.nodes,
            "per_node": plan.per_node,
            "world": plan.world,
            **(_build_layout_json(plan.layout) if plan.layout else {}),
        },
        "model": {
            "parameters": plan.size.parameters,
            "active_parameters": plan.size.active_parameters,
            "mtp_parameters": plan.size.mtp_parameters,
        },
        "weights": plan.weights or None,
        "settings": build_settings_json(plan.recipe),
        "step": {"tokens": plan.step_tokens, "flops": plan.step_flops, "peak": to_json_value(plan.peak)},
        "checkpoint": {"bytes": plan.checkpoint_bytes},
        "export": {"bytes": plan.export_bytes} if plan.export_bytes else None,
        "loss": _build_loss_json(plan.recipe),
        "balancing": _build_expert_balancing_json(plan.recipe),
        "stages": [_build_stage_json(chunks, memory) for chunks, memory in _pair_stages(plan)],
        "attention": to_json_value(plan.attention),
        "patches": [to_json_value(decision) for decision in plan.patches.decisions],
        "environment": [
            {"name": variable.name, "value": variable.value, "why": variable.reason}
            for variable in plan.environment
        ],
        "notes": list(plan.notes),
        "problems": [{"code": int(problem.code), "text": problem.text} for problem in plan.problems],
        "exit_code": int(plan.exit_code),
    }


def _build_layout_json(layout: RankLayout) -> dict[str, Any]:
    return {
        "microbatches": layout.microbatches,
        "bubble": layout.bubble,
        "axes": {
            axis.name: {
                "size": axis.size,
                "stride": axis.stride,
                "first_group": list(axis.list_group_ranks(0)),
            }
            for axis in layout.axes
        },
    }


def _build_expert_balancing_json(recipe: Recipe) -> dict[str, Any] | None:
    """Return the settings that balance experts; None where the model has none."""
    moe, chosen = recipe.architecture.moe, recipe.model.moe
    if moe is None:
        return None
    return {
        "aux_loss_coeff": moe.aux_loss_coeff,
        "over": "sequence" if moe.aux_loss_per_sequence else "micro-batch",
        "z_loss_coeff": chosen.z_loss_coeff,
        "bias_update_rate": chosen.bias_update_rate if moe.expert_bias else None,
    }


def _pair_stages(plan: Plan) -> Iterator[tuple[tuple[ModelChunk, ...], MemoryEstimate]]:
    """Return the chunks of each pipeline stage with its memory."""
    return zip(plan.layout.stages if plan.layout else (), plan.memory, strict=True)


def _build_stage_json(chunks: tuple[ModelChunk, ...], memory: MemoryEstimate) -> dict[str, Any]:
    return {
        "index": memory.stage,
        "chunks": to_json_value(chunks),
        "bytes": {
            **to_json_value(memory.states),
            "activations_held": memory.activations.saved,
            "activations_passing": memory.activations.transient,
            "rollout_weights": memory.rollout.weights,
            "rollout_passing": memory.rollout.transient,
            "rollout_overhead": memory.rollout.overhead,
            "learning": memory.learning_peak,
            "sampling": memory.sampling_peak,
            "total": memory.peak_bytes,
        },
        "in_flight": list(memory.activations.in_flight),
    }


def to_text(plan: Plan, run_command: str, start_text: str) -> str:
    """Return the plan in sections; the problems come last, where they are read."""
    sections: list[tuple[str, list[str]]] = [
        ("job", [f"{plan.recipe.name}: {plan.recipe.task} on {plan.hardware.backend}"]),
        ("model", [_format_model(plan.size)]),
        ("weights", [plan.weights] if plan.weights else []),
        ("hardware", [plan.hardware.reason]),
        ("megatron", [f"megatron-core {plan.megatron.version} ({plan.megatron.origin})"]),
        ("attention", list(_format_attention(plan))),
        ("operators", list(_format_operators(plan))),
        ("layout", list(_format_layout(plan))),
        ("length", [_format_training_length(plan)]),
        ("settings", format_settings(plan.recipe)),
        ("validation", [_format_validation_data(plan.recipe)]),
        ("step", [_format_step_tokens_and_flops(plan), *_format_bubble(plan.layout)]),
        ("loss", list(_format_loss_chunk_size(plan.recipe))),
        ("experts", list(_format_expert_balancing(plan.recipe))),
        (
            "stages",
            [
                f"{memory.stage}: {'; '.join(map(_format_chunk, chunks))}"
                for chunks, memory in _pair_stages(plan)
            ],
        ),
        ("memory", list(_format_memory(plan))),
        ("checkpoint", [_format_checkpoint_disk_usage(plan)]),
        ("export", list(_format_checkpoint_exports(plan))),
        ("patches", list(_format_patches(plan))),
        (
            "environment",
            [
                f"{variable.name}={variable.value or repr('')}  {variable.reason}"
                for variable in plan.environment
            ],
        ),
        ("run", [run_command] if run_command else []),
        ("starts", start_text.splitlines()),
        ("notes", list(plan.notes)),
        ("problems", [f"{problem.text} (exit {int(problem.code)})" for problem in plan.problems]),
    ]
    lines = [
        f"{name if first else '':<{_LABEL_WIDTH}}{line}"
        for name, body in sections
        for first, line in ((index == 0, line) for index, line in enumerate(body))
    ]
    return "\n".join(lines)


def _format_validation_data(recipe: Recipe) -> str:
    """Return the text about the data of validation."""
    share, named = recipe.data.validation, ", ".join(recipe.data.validation_sets)
    held_out = (
        f"{100 * share:g} % of the data is held out (data.validation)" if share else "no data is held out"
    )
    return f"{held_out}; data.validation_sets: {named}" if named else held_out


def _format_attention(plan: Plan) -> Iterator[str]:
    yield f"{plan.attention.value}: {plan.attention.why}"
    kernels = {
        candidate.name: candidate
        for candidate in capabilities.find_capabilities(plan.hardware.backend, plan.recipe.features).kernels
    }
    kernel, parallel = kernels.get(plan.attention.value), plan.recipe.parallel
    if (
        plan.recipe.data.packed
        and kernel is not None
        and (most := kernel.compute_max_sequences_per_pack(parallel.cp))
    ):
        yield f"a pack holds at most {most:,} sequences ({kernel.implementation})"


def _format_operators(plan: Plan) -> Iterator[str]:
    can = capabilities.find_capabilities(plan.hardware.backend, plan.recipe.features)
    for operator in can.list_applicable_operators(plan.recipe):
        chosen = can.uses_operator(plan.recipe, operator.name)
        left_out = "torch's own, because model.operators leaves it out"
        yield f"{operator.name}: {f'{operator.implementation}: {operator.reason}' if chosen else left_out}"


def _format_model(size: ParametersAndForwardFlops) -> str:
    active = (
        f", {_format_decimal(size.active_parameters, 'KMBT')} active"
        if size.active_parameters < size.parameters
        else ""
    )
    mtp = (
        f"; {_format_decimal(size.mtp_parameters, 'KMBT')} more in MTP layers" if size.mtp_parameters else ""
    )
    trained = (
        f"; {_format_decimal(size.adapter_parameters, 'KMBT')} of adapters are trained"
        if size.adapter_parameters
        else ""
    )
    frozen = (
        f"; {_format_decimal(size.frozen_parameters, 'KMBT')} of the vision tower are frozen"
        if size.frozen_parameters
        else ""
    )
    return f"{_format_decimal(size.parameters, 'KMBT')} parameters{active}{mtp}{trained}{frozen}"


def _format_step_tokens_and_flops(plan: Plan) -> str:
    """Return the tokens and FLOPs of a step, and its shortest time where the device's peak is known."""
    work = f"up to {plan.step_tokens:,} tokens, {_format_decimal(plan.step_flops, 'KMGTPEZY')}FLOPs"
    work += " (without the vision tower)" if plan.recipe.architecture.vision else ""
    if plan.peak is None or plan.recipe.model.dtype != "bf16" or plan.recipe.model.fp8 is not None:
        return work
    seconds = plan.step_flops / (plan.world * plan.peak.bf16)
    shown = f"{seconds:,.0f}" if seconds >= 10 else f"{seconds:.2g}"
    return f"{work}: {shown} s at the devices' peak of {_format_decimal(plan.peak.bf16, 'KMGTPEZY')}FLOP/s"


def _format_bubble(layout: RankLayout | None) -> Iterator[str]:
    if layout is not None and layout.find_axis_size("pp") > 1:
        schedule = "1F1B" if len(layout.stages[0]) == 1 else "interleaved 1F1B"
        yield (
            f"pipeline bubble: stages are idle for {layout.bubble:.0%} of a step ({schedule}, if all stages"
            " take equally long)"
        )


def _build_loss_json(recipe: Recipe) -> dict[str, int | None]:
    """Return how the loss takes the tokens of a micro-batch; None where megatron's own loss serves."""
    chunks = choose_loss_chunks(recipe)
    return {"kept_tokens": chunks and chunks.kept_tokens, "chunk_tokens": chunks and chunks.size}


def _format_loss_chunk_size(recipe: Recipe) -> Iterator[str]:
    """Yield how the loss takes its tokens, if it computes the logits of some twice."""
    chunks = choose_loss_chunks(recipe)
    if chunks is not None and chunks.kept_tokens < count_microbatch_tokens(recipe):
        yield (
            f"the logits of {chunks.kept_tokens:,} tokens are kept for the backward pass; it computes those"
            f" of the others again, {chunks.size:,} tokens at a time, to save memory"
        )


def _format_training_length(plan: Plan) -> str:
    """Return the length of the job, as far as it is known before its data is read."""
    train = plan.recipe.train
    if train.epochs is not None:
        return f"{train.epochs:g} epochs: run `check`, which tokenises the data, to see the number of steps"
    if (rl := plan.recipe.rl) is not None:
        updates = rl.answers_per_step // train.global_batch_size * rl.num_iterations
        warm_start = f", the first {rl.warm_start_steps:,} on the rows' own answers" * bool(
            rl.warm_start_steps
        )
        return (
            f"{train.steps:,} updates{warm_start}; {rl.prompts_per_step:,} questions x"
            f" {rl.num_generations:,} answers are {updates:,} update{'s' * (updates != 1)}"
        )
    return f"{train.steps:,} steps, {train.steps * train.global_batch_size:,} samples"


def _format_checkpoint_disk_usage(plan: Plan) -> str:
    size, keep = plan.checkpoint_bytes, plan.recipe.checkpoint.keep
    total_size = format_bytes(size * plan.recipe.checkpoint.peak_disk_count)
    return f"{format_bytes(size)} each; {keep} are kept while the next is written: {total_size} of disk"


def build_settings_json(recipe: Recipe) -> list[dict[str, Any]]:
    """Return the settings that decide how a recipe trains, and where each comes from."""
    return [to_json_value(setting) for setting in list_shown_settings(recipe.dump(), recipe.origins)]


def format_settings(recipe: Recipe) -> list[str]:
    """Return the settings of a recipe for people, a line for each."""
    settings = list(list_shown_settings(recipe.dump(), recipe.origins))
    width = max(len(setting.key) for setting in settings)
    return [f"{item.key:<{width}}  {_format_value(item.value)}  ({item.origin})" for item in settings]


def _format_value(value: Any) -> str:
    """Return a value in the form of a recipe."""
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value


def _format_checkpoint_exports(plan: Plan) -> Iterator[str]:
    """Yield the text about the exports of the run, if there are any."""
    checkpoint, train = plan.recipe.checkpoint, plan.recipe.train
    if checkpoint.export is None:
        return
    most = "at most " if checkpoint.export == "hf-fp8" else ""
    export_text = f"{checkpoint.export}, {most}{format_bytes(plan.export_bytes)}"
    if not checkpoint.export_interval:
        yield f"{export_text}, at the end"
        return
    count = (
        ""
        if train.epochs is not None
        else f": {checkpoint.count_exports(train.steps):,} exports, none is deleted"
    )
    yield f"{export_text}, every {checkpoint.export_interval:,} steps and at the end{count}"


def format_disk(disk: DiskUsage, directory: Path) -> str:
    """Return the text about the disk that a run needs, and whether its file system has the room."""
    needed = f"{format_bytes(disk.checkpoints)} of checkpoints, {format_bytes(disk.checkpoint)} each"
    if disk.exports:
        needed += f", {format_bytes(disk.exports)} of exports"
    if disk.written:
        needed += f", {format_bytes(disk.written)} already written"
    short = (
        ""
        if disk.is_sufficient
        else ": NOT ENOUGH. Free some, lower checkpoint.keep, or name another place with --run-directory"
    )
    return f"{needed}; {format_bytes(disk.free)} free for {directory}{short}"


def _format_decimal(amount: float, prefixes: str) -> str:
    """Return a number for people, by thousands: 30.5 B, 12.0 T; the prefix stands last."""
    power = 0
    while amount >= 999.95 and power < len(prefixes):
        amount, power = amount / 1000, power + 1
    return f"{amount:.1f} {prefixes[power - 1]}" if power else f"{amount:.0f} "


def _format_layout(plan: Plan) -> Iterator[str]:
    nodes = "1 node" if plan.nodes == 1 else f"{plan.nodes} nodes x {plan.per_node}"
    yield f"{plan.world} ranks on {nodes}"
    if plan.layout is None:
        return
    train, data = plan.recipe.train, plan.recipe.data
    count, rows = plan.layout.microbatches, plan.recipe.micro_batch_full_rows
    if count * train.micro_batch_size_or_one * plan.layout.find_axis_size("dp") == train.global_batch_size:
        batches = "1 micro-batch" if count == 1 else f"{count} micro-batches"
        yield f"{batches} per step of {rows} x {data.sequence_length} tokens on every data-parallel rank"
    experts = plan.recipe.architecture.moe is not None
    for axis in plan.layout.axes:
        if axis.size > 1 and (experts or axis.name in ("tp", "cp", "dp", "pp")):
            group = axis.list_group_ranks(0)
            ranks = " ".join(map(str, group[:8])) + (" ..." if len(group) > 8 else "")
            yield f"{axis.name} {axis.size}: ranks {ranks}"


def _format_expert_balancing(recipe: Recipe) -> Iterator[str]:
    """Yield how experts are balanced, where the model has any."""
    moe, chosen = recipe.architecture.moe, recipe.model.moe
    if moe is None:
        return
    if moe.aux_loss_coeff:
        extent = "sequence" if moe.aux_loss_per_sequence else "micro-batch"
        yield f"load-balancing loss: coefficient {moe.aux_loss_coeff:g}, per {extent}"
    elif moe.unused_aux_loss_coeff:
        yield (
            f"no load-balancing loss: router_aux_loss_coef {moe.unused_aux_loss_coeff:g} counts only with"
            " output_router_logits: true. To use a loss, set model.moe.aux_loss_coeff"
        )
    else:
        yield "no load-balancing loss"
    if chosen.z_loss_coeff:
        yield f"router z-loss: coefficient {chosen.z_loss_coeff:g}"
    if moe.expert_bias:
        yield f"expert bias of routers: changes by {chosen.bias_update_rate:g} per step"


def _format_chunk(chunk: ModelChunk) -> str:
    parts = (
        ["embedding"]
        if chunk.embedding
        else ["embedding (copy for MTP)"]
        if chunk.has_mtp_embedding_copy
        else []
    )
    if chunk.layers:
        first, last = chunk.layers[0], chunk.layers[-1]
        parts.append(f"layer {first}" if first == last else f"layers {first}-{last}")
    if chunk.mtp_layers:
        parts.append(f"{chunk.mtp_layers} MTP layer{'s' if chunk.mtp_layers > 1 else ''}")
    return ", ".join([*parts, "head"] if chunk.head else parts)


def _format_memory(plan: Plan) -> Iterator[str]:
    """Yield one line per stage with the memory of its fullest rank."""
    for stage in plan.memory:
        states, activations = stage.states, stage.activations
        parts = [
            f"weights {format_bytes(states.parameters)}",
            *([f"their FP8 copies {format_bytes(states.quantized)}"] if states.quantized else []),
            f"gradients {format_bytes(states.gradients)}",
            f"optimizer {format_bytes(states.master + states.moments + states.counters)}",
            f"activations {format_bytes(activations.saved)} (micro-batches in flight:"
            f" {max(activations.in_flight)})",
            f"temporary {format_bytes(activations.transient)}",
        ]
        rollout = [format_bytes(count) for count in stage.rollout]
        if plan.device_share is not None:
            parts.append("rollout server {0}, its overhead {2}, cache {1}".format(*rollout))
        elif stage.rollout.weights:
            parts.append("rollout engine {}, and {} more while answers are sampled".format(*rollout[:2]))
        host = f"; another {format_bytes(states.host)} offloaded to the host" if states.host else ""
        yield f"{stage.stage}: {format_bytes(stage.peak_bytes)} = {', '.join(parts)}{host}"
        if plan.device_share is not None:
            moments = format_bytes(stage.learning_peak), format_bytes(stage.sampling_peak)
            fraction = f"rl.rollout.mem_fraction_static {plan.device_share.chosen:g}"
            yield (f"{stage.stage}: {moments[0]} while training, {moments[1]} while sampling ({fraction})")
    size = plan.hardware.smallest_device_memory
    if plan.memory and size.value is not None:
        worst = max(stage.peak_bytes for stage in plan.memory)
        yield f"fullest rank: {worst / size.value:.0%} of {format_bytes(size.value)} ({size.reason})"


def _format_patches(plan: Plan) -> Iterator[str]:
    silent = (PatchAction.SKIP,)
    for decision in plan.patches.decisions:
        if decision.action not in silent:
            unproven = "" if decision.proven else " (unproven)"
            yield f"{decision.action} {decision.id}{unproven}: {decision.reason}"
    skipped = sum(decision.action in silent for decision in plan.patches.decisions)
    if skipped:
        yield f"{skipped} not needed"
