"""Megatron's data-parallel wrapper, distributed optimizer and learning-rate schedule for a recipe."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import distributed
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from bundle.mcore.config import DTYPES
from bundle.mcore.signatures import known
from bundle.recipe import Recipe


def _finalize_model_grads(*args: Any, **keywords: Any) -> None:
    """Megatron's own, looked up at each call: a patch may have replaced it after this module was imported."""
    distributed.finalize_model_grads(*args, **keywords)


def data_parallel(
    recipe: Recipe, config: TransformerConfig, chunks: Sequence[torch.nn.Module]
) -> list[DistributedDataParallel]:
    """The chunks, wrapped for mixed precision and gradient reduction, the schedule's hooks on `config`."""
    options = recipe.distributed
    if config.bf16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
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

    def each(attribute: str) -> Any:
        """One callable for one chunk, a list of them for several: the two forms that the schedules take."""
        callables = [getattr(chunk, attribute) for chunk in wrapped]
        return callables if len(callables) > 1 else callables[0]

    config.finalize_model_grads_func = _finalize_model_grads
    config.no_sync_func = each("no_sync")
    if options.overlap_param_gather:
        config.param_sync_func = each("start_param_sync")
    return wrapped


def optimizer(
    recipe: Recipe, chunks: Sequence[DistributedDataParallel], **megatrons: Any
) -> MegatronOptimizer:
    """Adam with its state and the fp32 weights sharded over data-parallel ranks; `megatrons` own options."""
    options, dtype = recipe.optimizer, DTYPES[recipe.model.dtype]
    config = OptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        min_lr=options.min_lr,
        weight_decay=options.weight_decay,
        adam_beta1=options.betas[0],
        adam_beta2=options.betas[1],
        adam_eps=options.eps,
        clip_grad=options.clip_grad,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
        **known(OptimizerConfig, overlap_param_gather=recipe.distributed.overlap_param_gather),
        **megatrons,
    )
    return get_megatron_optimizer(config, list(chunks))


def leave_out_what_is_not_finite(optimizer: MegatronOptimizer) -> None:
    """Has the optimizer leave a step out, (False, None, None), where the gradient norm is not finite.

    As it does when a scaled loss overflows. By itself it would clip by that norm and write it into every
    weight.
    """
    prepare = optimizer.prepare_grads

    def prepare_grads() -> bool:
        return prepare() or not math.isfinite(optimizer.get_grad_norm())

    optimizer.prepare_grads = prepare_grads


def schedule(recipe: Recipe, of: MegatronOptimizer) -> OptimizerParamScheduler:
    """The learning rate and weight decay by optimizer step; call `.step(increment=1)` after each.

    Megatron counts the steps that were taken: before the first one it would have a rate of 0, and before the
    last not yet the lowest. Here step n of a warm-up takes n parts of the highest rate, and the last step of
    the run takes the lowest.
    """
    options = recipe.optimizer
    before_highest = max(0, options.warmup_steps - 1)
    return OptimizerParamScheduler(
        of,
        init_lr=options.lr / max(1, options.warmup_steps),
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=before_highest,
        lr_decay_steps=max(recipe.train.steps - 1, before_highest + 1),
        lr_decay_style=options.schedule,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=recipe.train.steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
