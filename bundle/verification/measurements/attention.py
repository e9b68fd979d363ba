"""Attention over ranks: sinks, gates, given groups, latent and packed attention, and the gated delta net."""

import os
from itertools import accumulate
from typing import Any

import torch

from bundle.capabilities.ascend import ASCEND
from bundle.mcore import gated_delta, rotary
from bundle.mcore.gpt import build_cross_attention_layer, build_sink_attention
from bundle.verification.check import NotProvable
from bundle.verification.numbers import (
    DENSE_HF_CONFIG,
    MLA_CONFIG,
    YARN,
    Bench,
    BenchLayout,
    Numbers,
    draw_sequences_with_next_token,
    find_worst,
    measure_gap,
    sum_token_losses,
)

_HEAD_COUNT = 4  # of DENSE_HF_CONFIG


def measure_tp_sink_norm_gap(bench: Bench) -> float:
    """Measure the gradient norm of a model with learned sinks, each with its own gradient, on two ranks."""

    def compute_norm(layout: BenchLayout) -> Numbers:
        model = layout.build_chunk(DENSE_HF_CONFIG)
        offsets = build_sink_attention(model.config).to(bench.device)
        model.sinks = offsets
        heads = torch.arange(3.0, 3.0 + _HEAD_COUNT, device=bench.device)
        weights = heads.chunk(layout.tp.size)[layout.tp.rank]

        def add(_module: Any, _inputs: Any, losses: torch.Tensor) -> torch.Tensor:
            return losses + (offsets.softmax_offset * weights).sum()

        torch.nn.init.zeros_(offsets.softmax_offset)
        model.register_forward_hook(add)
        return {"norm": layout.take_step_and_get_norm(DENSE_HF_CONFIG, model)}

    return bench.measure_gap_to_one_rank(compute_norm, tp=2)


def measure_tp_gated_attention_gradients(bench: Bench) -> float:
    """Measure loss and norm-weight gradients of gated attention whose ranks share a group of heads.

    The norms' weights are whole on every rank. Two ranks are compared with one.
    """

    def compute_numbers(layout: BenchLayout) -> Numbers:
        options = {"attention_output_gate": True, "num_query_groups": 1, "sequence_parallel": False}
        model = layout.build_chunk(DENSE_HF_CONFIG, options)
        loss = sum_token_losses(model, layout.build_two_rows())
        loss.backward()
        norms = ("input_layernorm.weight", "pre_mlp_layernorm.weight", "final_layernorm.weight")
        norm_gradients = {name: x.grad for name, x in model.named_parameters() if name.endswith(norms)}
        return {"loss": loss.detach(), **norm_gradients}

    return bench.measure_gap_to_one_rank(compute_numbers, tp=2)


def measure_cross_attention_row_counts(bench: Bench) -> float:
    """Measure the number of weight rows of cross attention's projections on one of two ranks."""
    with bench.open_layout() as layout:
        config = layout.build_chunk(DENSE_HF_CONFIG).config
        layer = build_cross_attention_layer(config, torch.distributed.group.WORLD, layout.cp.group)
        half = config.num_attention_heads // 2 * config.kv_channels
        seen = [layer.linear_q.weight.shape[0], layer.linear_kv.weight.shape[0]]
        return measure_gap(
            {"rows": torch.tensor(seen).float()}, {"rows": torch.tensor([half, 2 * half]).float()}
        )


def measure_cp_packed_latent_attention(bench: Bench) -> float:
    """Measure three padded sequences on two context-parallel ranks, with both classes of rotary embedding."""
    sequences = draw_sequences_with_next_token((12, 24, 6))
    gaps = []
    for config, kind in ((MLA_CONFIG, "rope"), (MLA_CONFIG | YARN, "yarn")):
        embedding = {"rope_type": kind}
        with bench.open_layout() as layout:
            model = layout.build_chunk(config, embedding)
            reference = layout.run_backward(model, layout.build_single_batches(sequences))
        with bench.open_layout(cp=2) as layout:
            batch = layout.pack_padded_sequences(sequences, multiple=8)
            gaps.append(
                measure_gap(layout.run_backward(layout.build_chunk(config, embedding), [batch]), reference)
            )
    return find_worst(gaps)


def measure_uncompressed_query_projection(bench: Bench) -> float:
    """Measure queries straight from the hidden state against the product with the same weights alone."""
    with bench.open_layout() as layout:
        model = layout.build_chunk(MLA_CONFIG | {"q_lora_rank": None}, {"apply_rope_fusion": False})
        attention = model.decoder.layers[0].self_attention
        hidden = 3 * torch.randn(6, 1, attention.config.hidden_size, device=bench.device)
        seen = {"queries": attention.linear_q_proj(hidden)[0]}
        return measure_gap(seen, {"queries": hidden @ attention.linear_q_proj.weight.t()})


def measure_narrow_values(bench: Bench) -> float:
    """Measure value heads narrower than query heads, for a kernel that takes packs of one width only."""
    if bench.device.type == ASCEND.device:
        raise NotProvable(
            f"{ASCEND.find_kernel('flash').implementation} takes packed values that are narrower than keys"
        )
    with bench.open_layout() as layout:
        # Flash attention takes heads of two sizes in no layout: the patch is for packs alone.
        reference_model = layout.build_chunk(MLA_CONFIG, attention="unfused")
        for kernel in ("FLASH", "FUSED", "UNFUSED"):  # by which megatron holds a process to one of them
            os.environ.pop(f"NVTE_{kernel}_ATTN", None)
        return layout.measure_packed_gradient_gap(
            layout.build_chunk(MLA_CONFIG, attention="flash"),
            draw_sequences_with_next_token((12, 24, 6)),
            reference_model,
        )


_NO_SEQUENCE_PARALLEL_SETTINGS = {"sequence_parallel": False}
# Weights that are whole on each rank, with the whole gradient before gradients are made final.
_REPLICATED_MLA_WEIGHT_SUFFIXES = (
    "linear_kv_down_proj.weight",
    "linear_q_down_proj.weight",
    "input_layernorm.weight",
)


def measure_mla_down_projection_gradients(bench: Bench) -> float:
    """Measure the gradients of the down projections and of the norm before them: two ranks against one."""

    def compute_gradients(layout: BenchLayout) -> Numbers:
        model = layout.build_chunk(MLA_CONFIG, _NO_SEQUENCE_PARALLEL_SETTINGS)
        sum_token_losses(model, layout.build_two_rows()).backward()
        return {
            name: x.grad
            for name, x in model.named_parameters()
            if name.endswith(_REPLICATED_MLA_WEIGHT_SUFFIXES)
        }

    return bench.measure_gap_to_one_rank(compute_gradients, tp=2)


def measure_mla_query_norm_gradient(bench: Bench) -> float:
    """Measure the gradient norm of the norms of compressed queries, where no other weight learns."""

    def compute_norm(layout: BenchLayout) -> Numbers:
        model = layout.build_chunk(MLA_CONFIG, _NO_SEQUENCE_PARALLEL_SETTINGS)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("q_layernorm.weight"))
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise NotProvable("Transformer Engine has the norm of queries in a projection, by another name")
        return {"norm": layout.take_step_and_get_norm(MLA_CONFIG, model)}

    return bench.measure_gap_to_one_rank(compute_norm, tp=2)


def measure_delta_net_norm_gradient(bench: Bench) -> float:
    """Measure the gradient of the norm that all heads share, against the sum over the heads of all ranks.

    The reference is the formula for a weight that multiplies rows with a mean square of 1.
    """
    with bench.open_layout(tp=2) as layout:
        config = layout.build_chunk(DENSE_HF_CONFIG).config
        layer = gated_delta.build_small_delta_net(config).to(bench.device)
        seen: list[torch.Tensor] = []

        def record(_module: Any, inputs: Any, output: torch.Tensor) -> None:
            seen.append(inputs[0].detach())
            output.register_hook(seen.append)

        layer.out_norm.register_forward_hook(record)
        generator = torch.Generator().manual_seed(6)
        hidden, towards = torch.randn(2, 12, 2, config.hidden_size, generator=generator).to(bench.device)
        (layer(hidden, None)[0] * towards).sum().backward()
        layer_input, output_gradient = seen
        scale = (layer_input.square().mean(-1, keepdim=True) + config.layernorm_epsilon).rsqrt()
        reference = (output_gradient * layer_input * scale).sum(0)
        torch.distributed.all_reduce(reference, group=layout.tp.group)
        return measure_gap({"weight": layer.out_norm.weight.grad}, {"weight": reference})


_SEQUENCE_LENGTHS = (8, 4, 20, 12)  # of packed sequences; multiples of 4: both chunks of two ranks are even
_ROTARY_HEADS, _HEAD_WIDTH = 3, 16  # heads and their width


def measure_cp_packed_rotary(bench: Bench) -> float:
    """Measure rows of two context-parallel ranks, by the longest sequence's table, against trigonometry."""
    with bench.open_layout(cp=2) as layout:
        group = layout.cp.group
        rank, ranks = group.rank(), group.size()
        full_sequences = [
            torch.randn(length, _ROTARY_HEADS, _HEAD_WIDTH, device=bench.device)
            for length in _SEQUENCE_LENGTHS
        ]
        for sequence in full_sequences:
            torch.distributed.broadcast(sequence, torch.distributed.get_process_group_ranks(group)[0], group)
        local_rows = torch.cat([_cut_for_rank(sequence, rank, ranks) for sequence in full_sequences])
        reference = torch.cat(
            [_cut_for_rank(_apply_rotary(sequence), rank, ranks) for sequence in full_sequences]
        )
        boundaries = torch.tensor([0, *accumulate(_SEQUENCE_LENGTHS)], dtype=torch.int32, device=bench.device)
        seen = rotary.rotate_packed(
            local_rows, boundaries, _build_rotary_angle_table(max(_SEQUENCE_LENGTHS), bench.device), group
        )
        # Tensors of the meta device have no values: any look at one raises.
        rotary.rotate_packed(
            local_rows.to("meta"),
            boundaries.to("meta"),
            _build_rotary_angle_table(max(_SEQUENCE_LENGTHS), "meta"),
            group,
        )
    return float((seen - reference).abs().max() / reference.abs().max())


def _cut_for_rank(sequence: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    chunks = sequence.chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))


def _compute_angles(positions: int, device: Any) -> torch.Tensor:
    frequencies = 10.0 ** -torch.arange(0, _HEAD_WIDTH // 2, device=device)
    return torch.outer(torch.arange(positions, device=device), frequencies)


def _build_rotary_angle_table(positions: int, device: Any) -> torch.Tensor:
    angles = _compute_angles(positions, device)
    return torch.cat((angles, angles), -1)[:, None, None, :]


def _apply_rotary(sequence: torch.Tensor) -> torch.Tensor:
    """Return the halves of a head's width turned by the angle of their position: [s, n, d]."""
    angles = _compute_angles(sequence.shape[0], sequence.device)[:, None, :].double()
    first, second = sequence.double().chunk(2, -1)
    turned = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
    return torch.cat(turned, -1).float()


def measure_sync_free_pack_gap(bench: Bench) -> float:
    """Measure a padded pack in a dense bf16 model, while torch refuses every operation that waits."""
    if bench.device.type != "cuda":
        raise NotProvable("only a GPU makes the host wait")
    sequences = draw_sequences_with_next_token((12, 24, 6))
    with bench.open_layout() as layout:
        model = layout.build_chunk(DENSE_HF_CONFIG, dtype="bf16")
        reference = layout.run_backward(model, layout.build_single_batches(sequences))
        batch = layout.pack_padded_sequences(sequences, multiple=8)
        layout.run_backward(model, [batch])  # kernels are chosen and loaded
        model.zero_grad()
        torch.cuda.set_sync_debug_mode("error")
        try:
            seen = layout.run_backward(model, [batch])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return measure_gap({"loss": seen["loss"]}, {"loss": reference["loss"]})
