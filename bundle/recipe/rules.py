"""Check the rules that sections of a recipe must keep together, as far as no machine is needed."""

from collections.abc import Iterator
from datetime import date
from pathlib import Path

from bundle import hub
from bundle.architectures import from_config
from bundle.architectures.adapters import find_unmatched_targets, list_shortest_linear_suffixes
from bundle.architectures.contents import has_tokenizer
from bundle.architectures.published_names import PUBLISHED_NAMES
from bundle.architectures.tensors import Tensors
from bundle.errors import format_count
from bundle.recipe import chat_template, rl_rules
from bundle.recipe.data import BYTE_VOCABULARY, DataKind
from bundle.recipe.recipe import Recipe
from bundle.recipe.sections import Parallel
from bundle.recipe.stages import ChunkContents, count_rounds, find_stage_violations
from bundle.recipe.tasks import TASKS

# Experts of all layers, undivided: above any model known, and planned in a second or two.
MAX_LAYERS_TIMES_LOCAL_EXPERTS = 2**16

# (the key to change, what is wrong with it)
Violation = tuple[str, str]


def find_violations(recipe: Recipe) -> list[Violation]:
    """Return every rule that the recipe breaks."""
    broken_rules: list[Violation] = []
    for rule in (
        _check_tensor_parallel,
        _check_experts,
        _check_pipeline,
        _check_sequences,
        _check_mtp,
        _check_vision,
        _check_delta_nets,
        _check_recomputation,
        _check_fp8_and_export_settings,
        _check_adapters,
        _check_data,
        _check_training_and_optimizer,
        rl_rules.find_violations,
        _check_profile,
    ):
        broken_rules += rule(recipe)
    return broken_rules


def _check_tensor_parallel(recipe: Recipe) -> Iterator[Violation]:
    a, tp = recipe.architecture, recipe.parallel.tp
    sizes = {"num_attention_heads": a.num_attention_heads}
    if a.mla is None:
        sizes["num_key_value_heads"] = a.num_query_groups
    if 0 in a.moe_layer_pattern:
        sizes["intermediate_size"] = a.ffn_hidden_size
    if a.moe and a.moe.shared_ffn_hidden_size:
        sizes["width of the shared experts"] = a.moe.shared_ffn_hidden_size
    if a.delta_net:
        sizes["linear_num_key_heads"] = a.delta_net.num_key_heads
        sizes["linear_num_value_heads"] = a.delta_net.num_value_heads
    for name, size in sizes.items():
        if size % tp:
            yield "parallel.tp", f"{tp} does not divide {name} {size}"
    if tp > 1 and not recipe.parallel.sequence_parallel:
        key = "parallel.sequence_parallel"
        if 1 in a.moe_layer_pattern:
            yield key, "false is refused by megatron-core with experts and tp > 1. Set it to true."
        elif a.mla is not None:
            yield (
                key,
                "false fails with latent attention and tp > 1 in megatron-core before 0.14. Later versions"
                " leave gradients of rotary keys and of the weights below incomplete. Set it to true.",
            )
    if recipe.parallel.sequence_parallel and tp == 1:
        yield "parallel.sequence_parallel", "true needs tp > 1. Leave it out."


def _check_experts(recipe: Recipe) -> Iterator[Violation]:
    parallel, moe, balancing = recipe.parallel, recipe.architecture.moe, recipe.model.moe
    if moe is None:
        default_rate = type(balancing).model_fields["bias_update_rate"].default
        for key, value, unset in (
            ("aux_loss_coeff", balancing.aux_loss_coeff, None),
            ("z_loss_coeff", balancing.z_loss_coeff, 0),
            ("bias_update_rate", balancing.bias_update_rate, default_rate),
        ):
            if value and value != unset:
                yield f"model.moe.{key}", f"{value:g} is for experts, but the model has none. Leave it out."
        if recipe.model.router_replay:
            yield "model.router_replay", "true needs experts, but the model has none. Set it to false."
        if parallel.ep > 1:
            yield "parallel.ep", f"{parallel.ep} needs experts, but the model has none. Set it to 1."
        if parallel.etp != parallel.tp:
            yield "parallel.etp", f"{parallel.etp} is for experts, but the model has none. Leave it out."
        return
    layers = sum(moe.layer_pattern) + recipe.architecture.mtp_layers
    if layers * moe.num_experts > MAX_LAYERS_TIMES_LOCAL_EXPERTS * parallel.ep:
        yield (
            "parallel.ep",
            f"{layers} layers of {moe.num_experts} experts give more than"
            f" {MAX_LAYERS_TIMES_LOCAL_EXPERTS} experts on each rank, the limit of a plan. Raise it.",
        )
    if moe.num_experts % parallel.ep:
        yield "parallel.ep", f"{parallel.ep} does not divide the {moe.num_experts} experts"
    if recipe.architecture.linear_bias and parallel.etp > 1:
        yield (
            "parallel.etp",
            f"{parallel.etp} is not supported for experts with biases, because megatron-core adds each bias"
            " on every one of these ranks. Set it to 1.",
        )
    if moe.ffn_hidden_size % parallel.etp:
        yield "parallel.etp", f"{parallel.etp} does not divide moe_intermediate_size {moe.ffn_hidden_size}"


_FIRST_AND_LAST_STAGE_KEYS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_PIPELINE_LAYOUT_KEY = "parallel.pipeline_model_parallel_layout"
_MULTIPLE_STAGES_REQUIRED_MESSAGE = (
    "needs several pipeline stages, but parallel.pp is 1. Raise parallel.pp, or leave this key out."
)


def _check_pipeline(recipe: Recipe) -> Iterator[Violation]:
    parallel, layers = recipe.parallel, recipe.architecture.num_layers
    if parallel.vpp == 1:
        yield "parallel.vpp", "1 gives one model chunk per stage, which is the default. Set it to null."
    has_layout = parallel.pipeline_model_parallel_layout is not None
    if parallel.vpp is not None and parallel.pp == 1 and not has_layout:
        yield "parallel.vpp", f"{parallel.vpp} model chunks per pipeline stage need parallel.pp > 1."
    ends = {
        key: length for key in _FIRST_AND_LAST_STAGE_KEYS if (length := getattr(parallel, key)) is not None
    }
    if has_layout:
        for key in ends:
            yield (
                f"parallel.{key}",
                f"{_PIPELINE_LAYOUT_KEY} already sets every stage. Leave one of the two keys out.",
            )
        yield from _check_pipeline_layout(recipe)
    elif parallel.pp == 1:
        for key in ends:
            yield f"parallel.{key}", _MULTIPLE_STAGES_REQUIRED_MESSAGE
    elif _list_stages(recipe) is not None:
        return
    elif ends:
        lengths = ", ".join(f"{length} in the {key.split('_')[3]} stage" for key, length in ends.items())
        rest = f"{layers - sum(ends.values())} in {format_count(parallel.pp - len(ends), 'other stage')}"
        chunks_text = f" into {parallel.vpp} model chunks per stage" if parallel.vpp else ""
        for key in ends:
            yield (
                f"parallel.{key}",
                f"the layers are {lengths} and {rest}, which cannot be divided evenly{chunks_text}",
            )
    else:
        yield "parallel.pp", _explain_uneven_stages(parallel, layers)


def _check_pipeline_layout(recipe: Recipe) -> Iterator[Violation]:
    """Yield what is wrong with a layout string, and what is not computed in its stages."""
    parallel, architecture = recipe.parallel, recipe.architecture
    if parallel.pp == 1:
        yield _PIPELINE_LAYOUT_KEY, _MULTIPLE_STAGES_REQUIRED_MESSAGE
        return
    try:
        layout = parallel.pipeline_stages
    except ValueError as error:
        yield _PIPELINE_LAYOUT_KEY, str(error)
        return
    depth = architecture.mtp_layers
    for reason in find_stage_violations(
        layout, parallel.pp, layers=architecture.num_layers, mtp_layers=depth
    ):
        yield _PIPELINE_LAYOUT_KEY, reason
    chunks = count_rounds(layout, parallel.pp)
    if chunks is not None and (parallel.vpp or 1) != chunks:
        yield (
            "parallel.vpp",
            f"{parallel.vpp} differs from {_PIPELINE_LAYOUT_KEY}, which has"
            f" {format_count(chunks, 'stage')} per pipeline rank (pp {parallel.pp}). Leave this key out.",
        )
    if "m" not in "".join(layout) or "m" in layout[-1]:
        return
    where = "if the MTP layers (m) are in an earlier stage than the head (L). Put both into one stage."
    if architecture.tied_embeddings:
        yield _PIPELINE_LAYOUT_KEY, f"megatron-core cannot tie the head to the embedding {where}"
    if recipe.model.mtp.detach_embeddings:
        yield "model.mtp.detach_embeddings", f"true is not supported {where}"


def _list_stages(recipe: Recipe) -> tuple[tuple[ChunkContents, ...], ...] | None:
    """Return the contents of the chunks of each stage; None where the layout is impossible."""
    return recipe.parallel.compute_stages(recipe.architecture.num_layers, recipe.architecture.mtp_layers)


def _explain_uneven_stages(parallel: Parallel, layers: int) -> str:
    """Return why stages cannot be equal, and a length of the last one with which the others are equal."""
    chunks = parallel.pp * (parallel.vpp or 1)
    explanation = f"pp x vpp = {chunks} does not divide num_hidden_layers {layers}"
    key = "num_layers_in_last_pipeline_stage"
    for stage_layers in (-(-layers // chunks), layers // chunks):
        last = layers - stage_layers * (parallel.vpp or 1) * (parallel.pp - 1)
        if last > 0 and parallel.model_copy(update={key: last}).compute_stages(layers, 0):
            return f"{explanation}. Set parallel.{key} to {last}, which makes the other stages equal."
    return explanation


def _check_sequences(recipe: Recipe) -> Iterator[Violation]:
    parallel, length = recipe.parallel, recipe.data.sequence_length
    multiple = recipe.alignment.length_multiple_without_fp8
    if length % multiple:
        shares = f"cp {parallel.cp}" if parallel.cp > 1 else ""
        if parallel.sequence_parallel:
            shares += f"{' and ' if shares else ''}tp {parallel.tp} (sequence parallel)"
        yield "data.sequence_length", f"{length} is not a multiple of {multiple}, which {shares} needs."
    longest = recipe.architecture.max_position_embeddings
    if length > longest and not recipe.data.packed:  # positions begin anew in each sequence of a pack
        yield (
            "data.sequence_length",
            f"{length} exceeds the model's max_position_embeddings {longest}. If the model's rope_scaling"
            " allows more, also set model.config.max_position_embeddings.",
        )
    if recipe.data.packed and recipe.train.micro_batch_size_or_one != 1:
        yield (
            "train.micro_batch_size",
            f"{recipe.train.micro_batch_size_or_one} is not allowed with data.packed (a micro-batch is one"
            " pack). Set it to 1 and raise data.sequence_length.",
        )


def _check_mtp(recipe: Recipe) -> Iterator[Violation]:
    depth = recipe.architecture.mtp_layers
    for key in ("detach_trunk", "detach_embeddings"):
        if getattr(recipe.model.mtp, key) and not depth:
            yield f"model.mtp.{key}", "true needs MTP layers, but the model has none. Set it to false."
    if depth and recipe.architecture.windows:
        yield (
            "model.mtp.layers",
            "the model has sliding windows, but its config does not say whether MTP layers have them. Set it"
            " to 0.",
        )
    if depth >= recipe.data.sequence_length:
        yield (
            "model.mtp.layers",
            f"{depth} tokens are predicted, but a sequence has {recipe.data.sequence_length}.",
        )


def _check_vision(recipe: Recipe) -> Iterator[Violation]:
    """Yield what is not computed with a vision tower, and the keys that need a tower."""
    model = recipe.model
    if recipe.architecture.vision is None:
        for key, value in model.vision:
            if value:
                yield f"model.vision.{key}", "needs a vision tower, but the model has none. Leave it out."
        return
    for part in ("tower", "projector"):
        if getattr(model.vision, f"freeze_{part}") and getattr(model.vision, f"{part}_lr"):
            yield f"model.vision.{part}_lr", "frozen weights have no learning rate. Leave it out."
    if model.lora is not None:
        for key, value in model.vision:
            if value:
                yield (
                    f"model.vision.{key}",
                    "model.lora freezes all weights, so this has no effect. Use model.lora.targets instead.",
                )
    if model.fp8 is not None:
        yield "model.fp8", "FP8 is not supported for models with a vision tower. Leave it out."
    if recipe.architecture.mtp_layers:
        yield "model.mtp.layers", "multi-token prediction is not supported with a vision tower. Set it to 0."
    if recipe.task != "sft" or not recipe.data.has_template:
        yield "data.template", "a model with vision needs task: sft and data.template: chat."
    stages = _list_stages(recipe)
    deepest = len(recipe.architecture.vision.deepstack)
    if stages and (first := stages[0][0].layers) < deepest:
        vpp, key = recipe.parallel.vpp, "parallel.pp"
        remedy = f"Lower parallel.pp, or set parallel.{_FIRST_AND_LAST_STAGE_KEYS[0]} to"
        remedy += f" {deepest * (vpp or 1)} or more"
        if recipe.parallel.pipeline_model_parallel_layout is not None:
            key, remedy = _PIPELINE_LAYOUT_KEY, f"Write t {deepest} times or more before the first |"
        yield (
            key,
            f"the vision tower adds embeddings to the first {deepest} decoder layers, but the first"
            f" {'chunk of the first stage' if vpp else 'stage'} has {first} of them. {remedy}.",
        )
    if recipe.architecture.vision.channels != 3:
        yield "model.config.vision_config", "in_channels must be 3, because images are read in 3 colours."


def _check_delta_nets(recipe: Recipe) -> Iterator[Violation]:
    """Yield what is not computed with gated delta nets."""
    if recipe.architecture.delta_net is None:
        return
    if recipe.data.packed:
        yield (
            "data.packed",
            "true is not supported with gated delta nets: mcore-bundle does not use flash-linear-attention,"
            " with which megatron-core 0.18 and newer supports packs. Set it to false.",
        )
    if recipe.parallel.cp > 1:
        yield (
            "parallel.cp",
            f"{recipe.parallel.cp} is not supported with gated delta nets: each rank needs the whole sequence"
            " (megatron-core 0.18 and newer can divide it; mcore-bundle does not). Set it to 1.",
        )
    if recipe.architecture.mtp_layers:
        yield "model.mtp.layers", "multi-token prediction does not support gated delta nets. Set it to 0."
    if recipe.model.lora is not None:
        yield "model.lora", "adapters are not supported with gated delta nets. Leave it out."
    if recipe.model.fp8 is not None:
        yield "model.fp8", "FP8 is not supported with gated delta nets. Leave it out."
    if recipe.checkpoint.export == "hf-fp8":
        yield "checkpoint.export", "hf-fp8 does not support gated delta nets. Set it to hf."


RECOMPUTABLE_MODULES = {"core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"}


def _check_recomputation(recipe: Recipe) -> Iterator[Violation]:
    recompute, architecture = recipe.model.recompute, recipe.architecture
    if recompute is None:
        return
    if recompute.granularity == "full":
        if recompute.modules:
            names = ", ".join(map(repr, recompute.modules))
            yield "model.recompute.modules", f"granularity: full ignores {names}. Leave this key out."
        most_layers = max(
            (sum(chunk.layers for chunk in stage) for stage in _list_stages(recipe) or ()), default=None
        )
        if recompute.layers is not None and most_layers is not None and recompute.layers > most_layers:
            yield "model.recompute.layers", f"{recompute.layers} exceeds the {most_layers} layers of a stage"
        return
    for key, value in (("method", recompute.method), ("layers", recompute.layers)):
        if value is not None:
            yield (
                f"model.recompute.{key}",
                f"{value!r} has no effect with granularity: selective. Leave it out.",
            )
    if unknown := sorted(set(recompute.modules) - RECOMPUTABLE_MODULES):
        yield (
            "model.recompute.modules",
            f"unknown: {', '.join(map(repr, unknown))}."
            f" Choose from {', '.join(sorted(RECOMPUTABLE_MODULES))}.",
        )
    if "mla_up_proj" in recompute.modules and architecture.mla is None:
        yield "model.recompute.modules", "'mla_up_proj' needs latent attention, but the model has none."
    if architecture.moe is None and (
        experts := {"moe", "moe_act", "shared_experts"} & set(recompute.modules)
    ):
        yield "model.recompute.modules", f"the model has no experts. Remove {', '.join(sorted(experts))}."
    elif "shared_experts" in recompute.modules and not (
        architecture.moe and architecture.moe.shared_ffn_hidden_size
    ):
        yield "model.recompute.modules", "the model has no shared experts. Remove shared_experts."
    if "mlp" in recompute.modules and 0 not in architecture.moe_layer_pattern:
        yield "model.recompute.modules", "'mlp' is listed, but the model has no dense layers. Remove it."


def _check_fp8_and_export_settings(recipe: Recipe) -> Iterator[Violation]:
    if recipe.model.dtype == "fp32" and recipe.model.fp8 is not None:
        yield "model.dtype", "fp32 is not allowed with model.fp8. Set it to bf16."
    family = recipe.architecture.model_type
    if recipe.checkpoint.export == "hf-fp8" and PUBLISHED_NAMES[family].stacked_experts:
        yield (
            "checkpoint.export",
            f"hf-fp8 is not supported, because no library loads {family} in FP8 blocks. Set it to hf.",
        )
    if recipe.checkpoint.export_interval and recipe.checkpoint.export is None:
        yield "checkpoint.export_interval", "needs checkpoint.export: hf, hf-fp8 or peft."


def _check_adapters(recipe: Recipe) -> Iterator[Violation]:
    model, lora = recipe.model, recipe.model.lora
    if lora is None:
        if recipe.checkpoint.export == "peft":
            yield (
                "checkpoint.export",
                "peft writes adapters, but model.lora is not set. To write the whole model, use hf.",
            )
        return
    table = Tensors(recipe.architecture)
    if missing := find_unmatched_targets(table, lora.targets):
        known = ", ".join(list_shortest_linear_suffixes(table))
        yield "model.lora.targets", f"no projection is called {', '.join(missing)}. Choose from {known}."
    if lora.use_dora and lora.dropout:
        yield "model.lora.dropout", f"{lora.dropout} is not supported with model.lora.use_dora. Set it to 0."
    if model.fp8 is not None and model.fp8.scaling == "delayed":
        yield (
            "model.fp8.scaling",
            "delayed is not supported with model.lora: checkpoints of adapters do not contain its past"
            " values. Set it to tensorwise or blockwise.",
        )
    if model.moe.bias_update_rate and recipe.architecture.moe and recipe.architecture.moe.expert_bias:
        yield "model.moe.bias_update_rate", "adapters do not contain this bias. Set it to 0 with model.lora."
    published_layers = from_config(model.config).mtp_layers if table.names.mtp else 0
    if recipe.architecture.mtp_layers > published_layers:
        yield (
            "model.mtp.layers",
            f"{recipe.architecture.mtp_layers} MTP layers are set, but {published_layers} are published,"
            " and model.lora would freeze the others with random weights. Set it to at most"
            f" {published_layers}.",
        )


def _check_data(recipe: Recipe) -> Iterator[Violation]:
    data, vocabulary = recipe.data, recipe.architecture.vocab_size
    if data.tokenizer == "bytes" and vocabulary < BYTE_VOCABULARY:
        yield (
            "data.tokenizer",
            f"'bytes' needs a vocab_size of at least {BYTE_VOCABULARY}, but the model's is {vocabulary}.",
        )
    elif data.tokenizer == "bytes" and recipe.model.is_pretrained and not _is_byte_model(recipe):
        yield (
            "data.tokenizer",
            f"the weights in {recipe.model.path} were trained with another tokenizer than 'bytes'. Leave"
            " this key out, name hf:DIR, or set model.weights: random",
        )
    for key, source in _list_source_settings(recipe):
        if reason := explain_unfit_source(recipe.task, source):
            yield key, reason
    if data.weights is not None and len(data.weights) != len(data.path):
        yield (
            "data.weights",
            f"the list has {format_count(len(data.weights), 'weight')}, but data.path has"
            f" {format_count(len(data.path), 'path')}. Give one weight per path.",
        )
    if data.has_template and data.tokenizer == "bytes":
        yield (
            "data.template",
            "the tokenizer 'bytes' has no chat template. Set data.template: plain or data.tokenizer: hf:DIR.",
        )
    if data.custom_template_text is not None and (
        reason := chat_template.explain_missing_messages(data.custom_template_text)
    ):
        yield "data.template", reason
    if data.template_arguments and not data.has_template:
        yield "data.template_arguments", "needs a chat template. Set data.template: chat."
    if data.date is not None:
        if not data.has_template:
            yield "data.date", f"{data.date} needs a chat template. Set data.template: chat."
        try:
            date.fromisoformat(data.date)
        except ValueError as error:
            yield "data.date", f"{data.date}: {error}"


def _is_byte_model(recipe: Recipe) -> bool:
    """Return whether a pretrained model reads bytes: it has as many tokens, and no other tokenizer."""
    path = Path(hub.build_cache_path_if_pinned(recipe.model.path or ""))
    return recipe.architecture.vocab_size == BYTE_VOCABULARY and not has_tokenizer(path)


def explain_unfit_source(task: str, kind: DataKind) -> str | None:
    """Return why a task cannot be learned from files of a kind; None where it can."""
    if kind not in ("text", "megatron") or TASKS[task].has_plain_text_rows:
        return None
    return (
        f"{kind} files have no fields, but task {task} needs rows with {TASKS[task].row_fields}. Use jsonl,"
        " parquet or arrow files."
    )


def _list_source_settings(recipe: Recipe) -> Iterator[tuple[str, DataKind]]:
    """Yield the key and the kind of each data set whose kind the recipe names."""
    if recipe.data.source is not None:
        yield "data.source", recipe.data.source
    for name, validation_set in recipe.data.validation_sets.items():
        if validation_set.source is not None:
            yield f"data.validation_sets.{name}.source", validation_set.source


def _check_training_and_optimizer(recipe: Recipe) -> Iterator[Violation]:
    train, optimizer, distributed = recipe.train, recipe.optimizer, recipe.distributed
    if recipe.checkpoint.keep_best is not None and not recipe.task_traits.samples_answers:
        yield (
            "checkpoint.keep_best",
            f"'{recipe.checkpoint.keep_best}' is measured only by task rl, but task is {recipe.task}. Leave"
            " it out.",
        )
    for name, task in TASKS.items():
        if task.section and name != recipe.task and getattr(recipe, task.section) is not None:
            yield (
                task.section,
                f"applies only to task {name}, but task is {recipe.task}. Remove it, or set task: {name}.",
            )
    if optimizer.min_lr > optimizer.lr:
        yield "optimizer.min_lr", f"{optimizer.min_lr:g} exceeds lr {optimizer.lr:g}"
    if optimizer.warmup_ratio is not None and optimizer.warmup_steps:
        yield (
            "optimizer.warmup_ratio",
            f"{optimizer.warmup_ratio:g} and warmup_steps {optimizer.warmup_steps} are both set. Keep one.",
        )
    elif train.steps is not None and optimizer.count_warmup(train.steps) >= train.steps:
        yield (
            "optimizer.warmup_steps",
            f"{optimizer.warmup_steps} is not less than the {train.steps} steps of the run. Shorten the"
            f" warm-up, such as --set optimizer.warmup_steps={train.steps // 10}",
        )
    yield from _check_wsd(recipe)
    yield from _check_distributed_optimizer(recipe)
    yield from _check_precision_aware(recipe)
    has_evaluation = bool(recipe.data.validation or recipe.data.validation_sets)
    if train.early_stop is not None and not (has_evaluation and train.eval_interval):
        key = "train.eval_interval" if has_evaluation else "data.validation"
        yield "train.early_stop", f"needs evaluations on held-out data, but {key} is 0. Raise {key}."
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        yield "optimizer.betas", f"{list(optimizer.betas)} must be two numbers from 0 to below 1."
    if distributed.overlap_param_gather and not distributed.overlap_grad_reduce:
        yield "distributed.overlap_param_gather", "true needs overlap_grad_reduce: true in megatron-core."
    if train.global_batch_size % train.micro_batch_size_or_one:
        yield (
            "train.global_batch_size",
            f"{train.global_batch_size} is not a multiple of micro_batch_size"
            f" {train.micro_batch_size_or_one}",
        )
    elif recipe.devices.per_node is not None:
        world = recipe.devices.nodes * recipe.devices.per_node
        for violation in recipe.find_layout_violations(world):
            key, _, reason = violation.partition(": ")
            yield key, reason


def _check_distributed_optimizer(recipe: Recipe) -> Iterator[Violation]:
    optimizer = recipe.optimizer
    if not optimizer.use_distributed_optimizer:
        if recipe.distributed.overlap_param_gather:
            yield (
                "distributed.overlap_param_gather",
                "true needs optimizer.use_distributed_optimizer: true.",
            )
    elif optimizer.name != "adam":
        key = "optimizer.use_distributed_optimizer"
        yield (
            key,
            f"true is not possible, because megatron-core cannot shard the state of {optimizer.name}. Set it"
            " to false or null.",
        )


def _check_precision_aware(recipe: Recipe) -> Iterator[Violation]:
    optimizer, key = recipe.optimizer, "optimizer.use_precision_aware_optimizer"
    offload = optimizer.optimizer_cpu_offload
    typed_keys = [
        f"optimizer.{name}" for name, dtype in optimizer.moment_dtype_settings.items() if dtype != "fp32"
    ]
    if optimizer.use_precision_aware_optimizer:
        if optimizer.name != "adam" or not optimizer.use_distributed_optimizer:
            yield key, "true needs name: adam and use_distributed_optimizer: true in megatron-core."
        if recipe.model.dtype != "bf16":
            yield key, "true needs model.dtype: bf16."
    else:
        for name in typed_keys:
            yield name, f"bf16 needs {key}: true."
        if offload:
            yield "optimizer.optimizer_cpu_offload", f"true needs {key}: true in megatron-core."
    if offload:
        for name in typed_keys:
            yield name, "bf16 does not fit optimizer_cpu_offload, which needs fp32. Leave one of them out."
    elif optimizer.optimizer_offload_fraction != 1:
        fraction = optimizer.optimizer_offload_fraction
        yield "optimizer.optimizer_offload_fraction", f"{fraction:g} needs optimizer_cpu_offload: true."


def _check_profile(recipe: Recipe) -> Iterator[Violation]:
    if recipe.profile is None:
        return
    (first, last), steps = recipe.profile.steps, recipe.train.steps
    if not first <= last or (steps is not None and last > steps):
        yield "profile.steps", f"[{first}, {last}] is not a range within steps 1 to {steps or 'the last'}."


def _check_wsd(recipe: Recipe) -> Iterator[Violation]:
    optimizer, steps = recipe.optimizer, recipe.train.steps
    decay = optimizer.wsd_decay_steps
    if optimizer.schedule != "WSD":
        for key, value in (("wsd_decay_steps", decay), ("wsd_decay_style", optimizer.wsd_decay_style)):
            if value is not None:
                reason = f"{value!r} has no effect with schedule: {optimizer.schedule}. Leave it out."
                yield f"optimizer.{key}", reason
    elif decay is None:
        yield "optimizer.wsd_decay_steps", "missing. WSD needs the number of steps of its final decay."
    elif steps is not None and (warmup := optimizer.count_warmup(steps)) + decay > steps:
        yield (
            "optimizer.wsd_decay_steps",
            f"{decay} steps of decay and {warmup} steps of warm-up exceed the {steps} steps of the run.",
        )
