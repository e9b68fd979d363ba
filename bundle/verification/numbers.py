"""The numbers of a tiny model on this rank, its gradients, and their distance from a reference."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bundle.backends import Runtime
from bundle.errors import BundleError
from bundle.mcore import groups, optimization
from bundle.mcore.gpt import build_transformer_config
from bundle.mcore.groups import Groups
from bundle.mcore.packed_sequences import build_packed_seq_params
from bundle.models import gpt, naming
from bundle.packing.packing import Packing, shard
from bundle.recipe import Parallel, Recipe, from_mapping
from bundle.recipe.alignment import Alignment, Padding
from bundle.verification.check import NotProvable

VOCABULARY_SIZE = 64
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY_SIZE,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "rope_theta": 10000.0,
}
DENSE_HF_CONFIG = {"model_type": "qwen3", "head_dim": 16, **_SIZES}
EXPERTS_CONFIG = {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.5,
    "output_router_logits": True,
    **_SIZES,
}
# Latent attention whose value heads (16) are narrower than its query heads (16 + 8); no experts.
MLA_CONFIG = {
    "model_type": "deepseek_v3",
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    **_SIZES,
}
YARN = {
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
}


@dataclass(frozen=True)
class RankBatch:
    """The input of a model on this rank: [b, s / cp]; packed: [1, t / cp]."""

    ids: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    packed: Any = None


Numbers = dict[str, torch.Tensor]


def draw_sequences_with_next_token(lengths: Sequence[int]) -> list[torch.Tensor]:
    """Return sequences of these many tokens and one more to predict, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, VOCABULARY_SIZE, (n + 1,), generator=generator) for n in lengths]


def sum_token_losses(model: torch.nn.Module, batch: RankBatch, **options: Any) -> torch.Tensor:
    """Return the summed loss of a batch on this rank."""
    losses = model(
        batch.ids,
        batch.positions,
        None,
        labels=batch.labels,
        loss_mask=batch.mask,
        packed_seq_params=batch.packed,
        **options,
    )
    total: torch.Tensor = (losses * batch.mask).sum()
    return total


@dataclass(frozen=True)
class Bench:
    """One rank of an experiment. All ranks run the same measurement."""

    runtime: Runtime
    device: torch.device
    directory: Path  # empty, for files of the experiment; the same for all ranks
    timeout_seconds: int

    @contextmanager
    def open_layout(self, *, tp: int = 1, cp: int = 1, ep: int = 1) -> Iterator["BenchLayout"]:
        """Yield a layout of the ranks; without arguments every rank computes everything by itself."""
        sizes = Parallel(tp=tp, cp=cp, ep=ep, etp=1 if ep > 1 else tp)
        process_groups = groups.create_model_parallel_groups(
            sizes, seed=1, timeout_seconds=self.timeout_seconds
        )
        try:
            yield BenchLayout(**vars(process_groups), bench=self)
        finally:
            groups.destroy_model_parallel_groups()

    def measure_norm_gap(
        self, config: Mapping[str, Any], options: Mapping[str, Any] | None = None, **sizes: int
    ) -> float:
        """Return the distance of the gradient norm in a layout of these parallel sizes from one rank's."""
        return self.measure_gap_to_one_rank(
            lambda layout: layout.measure_gradient_norm(config, options), **sizes
        )

    def measure_gap_to_one_rank(self, compute: Callable[["BenchLayout"], Numbers], **sizes: int) -> float:
        """Return the distance of `compute` in a layout of these parallel sizes from `compute` on one rank."""
        with self.open_layout() as layout:
            reference = compute(layout)
        with self.open_layout(**sizes) as layout:
            return measure_gap(compute(layout), reference)


@dataclass(frozen=True)
class BenchLayout(Groups):
    """The process groups of one layout of the ranks, with the input and the numbers of a tiny model in it."""

    bench: Bench

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.bench.device

    def build_recipe(self, config: Mapping[str, Any], **model: Any) -> Recipe:
        """Return the job of a tiny model on this layout.

        `model` holds further keys of the recipe's model section.
        """
        return from_mapping(
            {
                "name": "tiny",
                "model": {"config": dict(config), "dtype": "fp32", **model},
                "parallel": {axis: getattr(self, axis).size for axis in ("tp", "cp", "ep", "etp")},
                "data": {"source": "text", "path": ["none"], "sequence_length": 128, "tokenizer": "hf:none"},
                "train": {"steps": 1, "global_batch_size": 8},
                "optimizer": {"warmup_steps": 0},
            },
        )

    def build_chunk(
        self,
        config: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
        **model: Any,
    ) -> torch.nn.Module:
        """Return the bare GPTModel of this rank, with the same weights in every layout.

        `options` are megatron's own. Raises NotProvable where this backend does not have the kernel.
        """
        job = self.build_recipe(config, **model)
        try:
            backend_options = self.bench.runtime.build_config_options(job)
        except BundleError as error:  # this backend has no such kernel, or not here
            raise NotProvable(str(error)) from error
        # A bare chunk has no buffers into which a product could add its weight gradient.
        fields = {**backend_options, "gradient_accumulation_fusion": False, **(options or {})}
        settings = build_transformer_config(job, fields)
        return gpt.build_chunks(job, settings, self.bench.runtime, self)[0].to(self.device)

    def build_batch(self, tokens: torch.Tensor, mask: torch.Tensor) -> RankBatch:
        """Return unpacked input from tokens [b, s + 1] and a loss mask [b, s]."""
        positions = torch.arange(mask.shape[1]).expand_as(mask)
        full_tensors = (tokens[:, :-1], positions, tokens[:, 1:], mask)
        return RankBatch(*(shard(x, self.cp.size, self.cp.rank).to(self.device) for x in full_tensors))

    def build_two_rows(self, length: int = 16) -> RankBatch:
        """Return two unpacked rows of so many tokens, all of which are learned."""
        return self.build_batch(
            torch.stack(draw_sequences_with_next_token((length, length))), torch.ones(2, length)
        )

    def build_single_batches(self, texts: Sequence[torch.Tensor]) -> list[RankBatch]:
        """Return each sequence as unpacked input of its own: the reference of everything packed."""
        return [self.build_batch(text[None], torch.ones(1, len(text) - 1)) for text in texts]

    def pack_padded_sequences(self, texts: Sequence[torch.Tensor], multiple: int) -> RankBatch:
        """Return all sequences as one packed input, each padded to a multiple of `multiple` tokens.

        With context parallelism `multiple` must be a multiple of 2 cp.
        """
        lengths = tuple(len(text) - 1 for text in texts)
        padding = Padding(lengths, tuple(-(-n // multiple) * multiple for n in lengths), tail_rows=0)
        packing = Packing(padding, Alignment("thd", cp=self.cp.size), self.cp.rank, self.device)
        ids, labels = (
            torch.cat([text[i : i + n] for text, n in zip(texts, lengths, strict=True)]) for i in (0, 1)
        )
        ids, labels = ids.to(self.device), labels.to(self.device)
        return RankBatch(
            packing.pack_concatenated_tokens(ids),
            packing.local_positions,
            packing.pack_concatenated_tokens(labels),
            packing.pack_concatenated_tokens(torch.ones_like(labels, dtype=torch.float32)),
            build_packed_seq_params(packing),
        )

    def measure_packed_gradient_gap(
        self,
        model: torch.nn.Module,
        sequences: Sequence[torch.Tensor],
        reference_model: torch.nn.Module | None = None,
    ) -> float:
        """Return the distance of the padded pack of all sequences from an unpacked pass for each.

        `reference_model` computes the unpacked passes; None: `model` does.
        """
        reference = self.run_backward(reference_model or model, self.build_single_batches(sequences))
        model.zero_grad()
        return measure_gap(
            self.run_backward(model, [self.pack_padded_sequences(sequences, multiple=8)]), reference
        )

    def run_backward(self, model: torch.nn.Module, batches: Sequence[RankBatch]) -> Numbers:
        """Return the loss and every gradient of the batches' sum, summed over the context-parallel ranks."""
        total = torch.zeros((), device=batches[0].mask.device)
        for batch in batches:
            loss = sum_token_losses(model, batch)
            loss.backward()
            total += loss.detach()
        return {"loss": self.sum_over_cp_ranks(total), **self.collect_cp_summed_gradients(model)}

    def collect_cp_summed_gradients(self, model: torch.nn.Module) -> Numbers:
        """Return every gradient by the parameter's name, summed over context-parallel ranks.

        The names do not depend on the layout.
        """
        return {
            entry.name: self.sum_over_cp_ranks(entry.parameter.grad.clone())
            for entry in naming.find_parameters(model, self)
            if entry.parameter.grad is not None
        }

    def sum_over_cp_ranks(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over the context-parallel ranks, which also overwrites `x`."""
        torch.distributed.all_reduce(x, group=self.cp.group)
        return x

    def measure_gradient_norm(
        self,
        config: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
        *,
        rows_at_once: int = 2,
    ) -> Numbers:
        """Return the norm that the optimizer finds after a step of the schedule, the same on every rank."""
        model = self.build_chunk(config, options)
        return {"norm": self.take_step_and_get_norm(config, model, rows_at_once=rows_at_once)}

    def take_step_and_get_norm(
        self, config: Mapping[str, Any], model: torch.nn.Module, *, rows_at_once: int = 2
    ) -> torch.Tensor:
        """Take a step of the pipeline schedule and the optimizer; return its gradient norm.

        The step has two rows, in one micro-batch or in two. It leaves its weights in `model`.
        """
        job = self.build_recipe(config)
        wrapped = optimization.wrap_data_parallel(job, model.config, [model])
        optimizer = optimization.build_optimizer(job, wrapped)
        tokens = torch.stack(draw_sequences_with_next_token((32, 32)))
        parts = [self.build_batch(part, torch.ones(rows_at_once, 32)) for part in tokens.split(rows_at_once)]

        def step(
            batches: Iterator[RankBatch], part: torch.nn.Module
        ) -> tuple[torch.Tensor, Callable[..., Any]]:
            batch = next(batches)
            loss, tokens = sum_token_losses(part, batch), batch.mask.sum()
            if model.config.calculate_per_token_loss:
                return loss, lambda _: (loss, tokens.int(), {})
            return loss, lambda _: (loss / (tokens * self.cp.size), {})  # megatron multiplies by cp

        optimization.forward_backward(step, parts, wrapped, sequence_length=32, micro_batch_size=rows_at_once)
        _, norm, _ = optimizer.step()
        return torch.tensor(norm)


def measure_gap(actual: Numbers, reference: Numbers) -> float:
    """Return the largest distance of any number, relative to the largest of its tensor.

    The gap is infinite if a tensor is missing on one side.
    """
    if actual.keys() != reference.keys():
        return float("inf")
    distances = [_compute_relative_max_difference(actual[name], reference[name]) for name in reference]
    return find_worst(distances)


def find_worst(gaps: Iterable[float | torch.Tensor]) -> float:
    """Return the largest gap; NaN if one is NaN, which Python's max would lose behind another."""
    return float(torch.stack([torch.as_tensor(distance).double().cpu() for distance in gaps]).max())


def _compute_relative_max_difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a - b).abs().max() / b.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
