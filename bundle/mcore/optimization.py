"""One step of megatron: data parallelism, pipeline schedules, optimizers, the learning rate by step."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import tee
from typing import Any

import torch
from megatron.core import distributed
from megatron.core import optimizer as optimizers
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from bundle.mcore import context, filter_keywords
from bundle.mcore.adapters import has_loraplus_rate
from bundle.mcore.gpt import DTYPES
from bundle.recipe import Recipe
from bundle.recipe.sections import Optimizer

ForwardStep = Callable[[Iterator[Any], torch.nn.Module], tuple[torch.Tensor, Callable[..., Any]]]

FULL_CPU_OFFLOAD_OPTIONS = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0,
}  # of `optimizer`


def _call_late_bound_finalize_grads(*args: Any, **keywords: Any) -> None:
    """Call megatron's own function, looked up at each call: a patch may replace it after this import."""
    distributed.finalize_model_grads(*args, **keywords)


def wrap_data_parallel(
    recipe: Recipe, config: TransformerConfig, chunks: Sequence[torch.nn.Module]
) -> list[DistributedDataParallel]:
    """Return the chunks, wrapped for mixed precision and gradient reduction.

    The schedule's hooks are set on `config`.
    """
    options = recipe.distributed
    if config.bf16:
        chunks = [_wrap_bf16_keeping_buffers(config, chunk) for chunk in chunks]
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=recipe.optimizer.use_distributed_optimizer,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather,
        bucket_size=options.bucket_size,
    )
    # Only the first chunk reduces in several buckets: the pipeline hides what later chunks could hide.
    wrapped = [
        DistributedDataParallel(config, settings, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]

    def collect_callables(attribute: str) -> Any:
        """Return one callable for one chunk, a list for several: the two forms that the schedules take."""
        callables = [getattr(chunk, attribute) for chunk in wrapped]
        return callables if len(callables) > 1 else callables[0]

    config.finalize_model_grads_func = _call_late_bound_finalize_grads
    config.no_sync_func = collect_callables("no_sync")
    if options.overlap_param_gather:
        config.param_sync_func = collect_callables("start_param_sync")
    return wrapped


def _wrap_bf16_keeping_buffers(config: TransformerConfig, chunk: torch.nn.Module) -> Float16Module:
    """Return the chunk, wrapped, with parameters in bf16.

    Buffers that megatron would round once keep their type: the biases that steer routers, which are published
    in fp32, and a tower's frequencies. The counts of routers begin at 0; the patch `expert-bias-counts`
    handles them.
    """
    before = dict(chunk.named_buffers())
    wrapped = Float16Module(config, chunk)
    for name, buffer in list(chunk.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        if leaf != "local_tokens_per_expert" and buffer.dtype != before[name].dtype:
            setattr(chunk.get_submodule(owner), leaf, before[name])
    return wrapped


def complete_overlapped_param_gather(recipe: Recipe, chunks: Sequence[DistributedDataParallel]) -> None:
    """Give every rank the weights of the last step, where that is left to the next forward pass."""
    if recipe.distributed.overlap_param_gather:
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)


def build_optimizer(
    recipe: Recipe, chunks: Sequence[DistributedDataParallel], **megatron_options: Any
) -> MegatronOptimizer:
    """Return the recipe's optimizer; `megatron_options` are passed on unchanged."""
    options, dtype = recipe.optimizer, DTYPES[recipe.model.dtype]
    config = OptimizerConfig(
        optimizer=options.name,
        lr=options.lr,
        min_lr=options.min_lr,
        weight_decay=options.weight_decay,
        adam_beta1=options.betas[0],
        adam_beta2=options.betas[1],
        adam_eps=options.eps,
        sgd_momentum=options.sgd_momentum,
        clip_grad=options.clip_grad,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=options.use_distributed_optimizer,
        **filter_keywords(OptimizerConfig, overlap_param_gather=recipe.distributed.overlap_param_gather),
        **_build_precision_aware_options(options),
        **megatron_options,
    )
    with _split_param_groups_by_lr(recipe, chunks):
        return get_megatron_optimizer(config, list(chunks))


@contextmanager
def _split_param_groups_by_lr(recipe: Recipe, chunks: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Divide megatron's groups of parameters by learning rates inside the block, on every rank alike.

    The recipe's own rate comes first. By `lr_mult` megatron identifies a group when it loads a checkpoint, in
    every release. The way to ask for several groups differs by release.
    """
    model, default_rate, original = recipe.model, recipe.optimizer.lr, optimizers._get_param_groups
    loraplus_ratio = model.lora.loraplus_lr_ratio if model.lora else 1.0
    other_rates = (model.vision.tower_lr, model.vision.projector_lr)
    multiples = dict.fromkeys(
        (1.0, *((rate or default_rate) / default_rate for rate in other_rates), loraplus_ratio)
    )
    parameters = [
        (name.rpartition("module.")[2], parameter)
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
    ]
    multiples_by_id = {
        id(parameter): loraplus_ratio
        if has_loraplus_rate(name)
        else (model.vision.find_tensor_lr(name) or default_rate) / default_rate
        for name, parameter in parameters
    }

    def split_groups(*args: Any, **keywords: Any) -> list[dict[str, Any]]:
        return [
            {
                **group,
                "params": [
                    parameter for parameter in group["params"] if multiples_by_id[id(parameter)] == multiple
                ],
            }
            | {"lr_mult": multiple}
            for group in original(*args, **keywords)
            for multiple in multiples
        ]

    optimizers._get_param_groups = split_groups
    try:
        yield
    finally:
        optimizers._get_param_groups = original


def _build_precision_aware_options(options: Optimizer) -> dict[str, Any]:
    """Return the types in which the optimizer's state is kept, and where.

    `store_param_remainders`, the 16 bits of an fp32 weight that bf16 lacks, is never used. Megatron writes
    them into a checkpoint that any layout can load, and fails when it reads them (seen with 0.16.1 on a GPU).
    """
    if not options.use_precision_aware_optimizer:
        return {}
    settings: dict[str, Any] = {
        name: DTYPES[dtype_name] for name, dtype_name in options.moment_dtype_settings.items()
    }
    settings |= filter_keywords(OptimizerConfig, store_param_remainders=False)
    if options.optimizer_cpu_offload:
        settings |= {"optimizer_cpu_offload": True}
        settings |= {"optimizer_offload_fraction": options.optimizer_offload_fraction}
    return {"use_precision_aware_optimizer": True, **settings}


def fuse_adam(optimizer: MegatronOptimizer) -> None:
    """Make torch's Adam update each tensor by one kernel, whatever the run that wrote a checkpoint used.

    The kernel counts steps on the parameters' device. Outside of a step nothing shows that it was used, and
    checkpoints are those of any other Adam.
    """

    def begin(inner: torch.optim.Optimizer, *_: Any) -> None:
        for group in inner.param_groups:
            group["fused"] = True
        for parameter, state in inner.state.items():
            if "step" in state:
                state["step"] = state["step"].to(parameter.device)

    def end(inner: torch.optim.Optimizer, *_: Any) -> None:
        for group in inner.param_groups:
            group["fused"] = None

    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(inner := part.optimizer, torch.optim.Adam):
            inner.register_step_pre_hook(begin)
            inner.register_step_post_hook(end)


def skip_nonfinite_updates(optimizer: MegatronOptimizer) -> None:
    """Make the optimizer skip a step, (False, None, None), where the gradient norm is not finite.

    It does the same when a scaled loss overflows. By itself it would clip by that norm and write it into
    every weight.
    """
    prepare = optimizer.prepare_grads

    def prepare_grads() -> bool:
        return prepare() or not math.isfinite(optimizer.get_grad_norm())

    optimizer.prepare_grads = prepare_grads


class _LrMultScheduler(OptimizerParamScheduler):
    """A schedule whose rate is multiplied by `lr_mult` of each group; megatron's does that up to 0.15."""

    def get_lr(self, group: dict[str, Any]) -> float:
        """Return the rate after the steps that were taken.

        An inverse square root uses the whole warm-up: `lr_warmup_steps` is one less (see `build_scheduler`).
        """
        if self.lr_decay_style != "inverse-square-root" or self.num_steps <= self.lr_warmup_steps:
            return float(super().get_lr(group))
        rate = self.max_lr * math.sqrt((self.lr_warmup_steps + 1) / self.num_steps)
        return float(max(self.min_lr, rate))

    def step(self, increment: int) -> None:
        super().step(increment)
        rate: float = self.get_lr({})
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)


def build_scheduler(recipe: Recipe, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Return the learning rate and weight decay by optimizer step; call `.step(increment=1)` after each.

    Megatron counts the steps that were taken: before the first one it would have a rate of 0, and before the
    last not yet the lowest. Here step n of a warm-up takes n parts of the highest rate, and the last step of
    the run takes the lowest. After a warm-up of w steps, step n of an inverse square root takes megatron's lr
    * sqrt(w / (n - 1)); n - 1 steps were taken before it.
    """
    options = recipe.optimizer
    warmup = options.count_warmup(recipe.train.steps)
    before_highest = max(0, warmup - 1)
    return _LrMultScheduler(
        optimizer,
        init_lr=options.lr / max(1, warmup),
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=before_highest,
        lr_decay_steps=max(recipe.train.steps - 1, before_highest + 1),
        lr_decay_style=options.schedule,
        wsd_decay_steps=options.wsd_decay_steps,
        lr_wsd_decay_style=options.wsd_decay_style or "exponential",
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=recipe.train.steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def forward_backward(
    step: ForwardStep,
    micro_batches: Sequence[Any],
    chunks: Sequence[torch.nn.Module],
    *,
    sequence_length: int,
    micro_batch_size: int,
    forward_only: bool = False,
) -> list[dict[str, Any]]:
    """Return the loss function's result for each micro-batch on the last stage; elsewhere an empty list.

    Megatron's schedule for the layout runs the micro-batches of a step through every pipeline stage.
    `sequence_length` [tokens of the whole row, before it is cut for context parallel] and `micro_batch_size`
    [rows] give the shape of what stages exchange. Each model chunk reads the same micro-batches.
    """
    several = len(chunks) > 1
    iterators = tee(micro_batches, len(chunks))
    with context.schedule_run.set(object()):
        results: list[dict[str, Any]] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=list(iterators) if several else iterators[0],
            model=list(chunks) if several else chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=sequence_length,
            micro_batch_size=micro_batch_size,
            forward_only=forward_only,
        )
    return results


def build_offloaded_adam(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return an Adam on the host over parameters of any dtype, with steps in fp32."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    adam = torch.optim.AdamW
    options: dict[str, Any] = {"cpu_optimizer_cls": adam, "gpu_optimizer_cls": adam, "offload_fraction": 1.0}
    group = {"params": list(parameters), "lr": 1e-3}
    optimizer: torch.optim.Optimizer = HybridDeviceOptimizer(
        [group], param_update_in_fp32=True, pin_cpu_grads=False, **options
    )
    return optimizer


def list_offload_optimizer_parameters(optimizer: Any) -> list[torch.Tensor]:
    """Return the tensors that the parts of an offloaded optimizer step, copies or not, in their order."""
    distributed = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    return [
        parameter
        for chained in distributed
        for part in chained.optimizer.sub_optimizers
        for group in part.param_groups
        for parameter in group["params"]
    ]
