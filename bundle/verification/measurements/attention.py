"""Attention over ranks: sinks, gates, given groups, latent and packed, and the gated delta net beside it."""

import os
from itertools import accumulate
from typing import Any

import torch

from bundle.capabilities.ascend import ASCEND
from bundle.mcore import gated_delta, rotary
from bundle.mcore.gpt import cross_attention, with_sinks
from bundle.verification.check import NotProvable
from bundle.verification.numbers import DENSE, LATENT, YARN, Bench, Layout, Numbers, gap, run, texts, worst

_HEADS = 4  # of DENSE


def sinks(bench: Bench) -> float:
    """The gradient norm of a model with learned sinks, each with a gradient of its own."""

    def norm(layout: Layout) -> Numbers:
        model = layout.chunk(DENSE)
        offsets = with_sinks(model.config).to(bench.device)
        model.sinks = offsets
        heads = torch.arange(3.0, 3.0 + _HEADS, device=bench.device)
        weights = heads.chunk(layout.tp.size)[layout.tp.rank]

        def add(_module: Any, _given: Any, losses: torch.Tensor) -> torch.Tensor:
            return losses + (offsets.softmax_offset * weights).sum()

        torch.nn.init.zeros_(offsets.softmax_offset)
        model.register_forward_hook(add)
        return {"norm": layout.stepped(DENSE, model)}

    return bench.gap_to_one_rank(norm, tp=2)


def gated_output(bench: Bench) -> float:
    """The loss and the gradients of whole weights of gated attention whose ranks share a group of heads."""

    def numbers(layout: Layout) -> Numbers:
        options = {"attention_output_gate": True, "num_query_groups": 1, "sequence_parallel": False}
        model = layout.chunk(DENSE, options)
        loss = run(model, layout.two_rows())
        loss.backward()
        norms = ("input_layernorm.weight", "pre_mlp_layernorm.weight", "final_layernorm.weight")
        whole = {name: x.grad for name, x in model.named_parameters() if name.endswith(norms)}
        return {"loss": loss.detach(), **whole}

    return bench.gap_to_one_rank(numbers, tp=2)


def given_ranks(bench: Bench) -> float:
    """How many rows of their weights the projections of cross attention have on one of two ranks."""
    with bench.layout() as layout:
        config = layout.chunk(DENSE).config
        layer = cross_attention(config, torch.distributed.group.WORLD, layout.cp.group)
        half = config.num_attention_heads // 2 * config.kv_channels
        seen = [layer.linear_q.weight.shape[0], layer.linear_kv.weight.shape[0]]
        return gap({"rows": torch.tensor(seen).float()}, {"rows": torch.tensor([half, 2 * half]).float()})


def packed_over_ranks(bench: Bench) -> float:
    """Three padded sequences on two context-parallel ranks, with both classes of rotary embedding."""
    sequences = texts((12, 24, 6))
    gaps = []
    for config, kind in ((LATENT, "rope"), (LATENT | YARN, "yarn")):
        embedding = {"rope_type": kind}
        with bench.layout() as layout:
            model = layout.chunk(config, embedding)
            reference = layout.trained(model, layout.single(sequences))
        with bench.layout(cp=2) as layout:
            batch = layout.packed(sequences, multiple=8)
            gaps.append(gap(layout.trained(layout.chunk(config, embedding), [batch]), reference))
    return worst(gaps)


def uncompressed_queries(bench: Bench) -> float:
    """Queries straight from the hidden state, against the product with the same weights and nothing else."""
    with bench.layout() as layout:
        model = layout.chunk(LATENT | {"q_lora_rank": None}, {"apply_rope_fusion": False})
        attention = model.decoder.layers[0].self_attention
        hidden = 3 * torch.randn(6, 1, attention.config.hidden_size, device=bench.device)
        seen = {"queries": attention.linear_q_proj(hidden)[0]}
        return gap(seen, {"queries": hidden @ attention.linear_q_proj.weight.t()})


def narrow_values(bench: Bench) -> float:
    """Value heads narrower than query heads, for a kernel that takes packed input of one width only."""
    if bench.device.type == ASCEND.device:
        raise NotProvable(f"{ASCEND.kernel('flash').what} takes packed values that are narrower than keys")
    with bench.layout() as layout:
        # Flash attention takes heads of two sizes in no layout: the patch is for packs alone.
        alone = layout.chunk(LATENT, attention="unfused")
        for kernel in ("FLASH", "FUSED", "UNFUSED"):  # by which megatron holds a process to one of them
            os.environ.pop(f"NVTE_{kernel}_ATTN", None)
        return layout.packed_gap(layout.chunk(LATENT, attention="flash"), texts((12, 24, 6)), alone)


_WHOLE = {"sequence_parallel": False}
# Weights of which each rank has all, and gets all of the gradient before anything is made final.
_BELOW = ("linear_kv_down_proj.weight", "linear_q_down_proj.weight", "input_layernorm.weight")


def rotary_key(bench: Bench) -> float:
    """The gradients of the down projections and of the norm below."""

    def gradients(layout: Layout) -> Numbers:
        model = layout.chunk(LATENT, _WHOLE)
        run(model, layout.two_rows()).backward()
        return {name: x.grad for name, x in model.named_parameters() if name.endswith(_BELOW)}

    return bench.gap_to_one_rank(gradients, tp=2)


def query_norm(bench: Bench) -> float:
    """The norm of the gradients of the norms of compressed queries, where nothing else learns."""

    def norm(layout: Layout) -> Numbers:
        model = layout.chunk(LATENT, _WHOLE)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("q_layernorm.weight"))
        return {"norm": layout.stepped(LATENT, model)}

    return bench.gap_to_one_rank(norm, tp=2)


def output_norm(bench: Bench) -> float:
    """The gradient of the norm that all heads share, against the sum over the heads of all ranks.

    By the formula of a weight that multiplies what has a mean square of 1.
    """
    with bench.layout(tp=2) as layout:
        config = layout.chunk(DENSE).config
        layer = gated_delta.alone(config).to(bench.device)
        seen: list[torch.Tensor] = []

        def keep(_module: Any, given: Any, output: torch.Tensor) -> None:
            seen.append(given[0].detach())
            output.register_hook(seen.append)

        layer.out_norm.register_forward_hook(keep)
        generator = torch.Generator().manual_seed(6)
        hidden, towards = torch.randn(2, 12, 2, config.hidden_size, generator=generator).to(bench.device)
        (layer(hidden, None)[0] * towards).sum().backward()
        given, arrived = seen
        scale = (given.square().mean(-1, keepdim=True) + config.layernorm_epsilon).rsqrt()
        reference = (arrived * given * scale).sum(0)
        torch.distributed.all_reduce(reference, group=layout.tp.group)
        return gap({"weight": layer.out_norm.weight.grad}, {"weight": reference})


_LENGTHS = (8, 4, 20, 12)  # of packed sequences; multiples of 4: both chunks of two ranks are even
_ROTATED, _WIDTH = 3, 16  # heads and their width


def rotary_positions(bench: Bench) -> float:
    """Rows of two context-parallel ranks, by a table of the longest sequence, against plain trigonometry."""
    with bench.layout(cp=2) as layout:
        group = layout.cp.group
        rank, ranks = group.rank(), group.size()
        whole = [torch.randn(length, _ROTATED, _WIDTH, device=bench.device) for length in _LENGTHS]
        for sequence in whole:
            torch.distributed.broadcast(sequence, torch.distributed.get_process_group_ranks(group)[0], group)
        mine = torch.cat([_cut(sequence, rank, ranks) for sequence in whole])
        reference = torch.cat([_cut(_rotated(sequence), rank, ranks) for sequence in whole])
        boundaries = torch.tensor([0, *accumulate(_LENGTHS)], dtype=torch.int32, device=bench.device)
        seen = rotary.turned(mine, boundaries, _table(max(_LENGTHS), bench.device), group)
        # Tensors of the meta device have no values: any look at one raises.
        rotary.turned(mine.to("meta"), boundaries.to("meta"), _table(max(_LENGTHS), "meta"), group)
    return float((seen - reference).abs().max() / reference.abs().max())


def _cut(sequence: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    chunks = sequence.chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))


def _angles(positions: int, device: Any) -> torch.Tensor:
    frequencies = 10.0 ** -torch.arange(0, _WIDTH // 2, device=device)
    return torch.outer(torch.arange(positions, device=device), frequencies)


def _table(positions: int, device: Any) -> torch.Tensor:
    angles = _angles(positions, device)
    return torch.cat((angles, angles), -1)[:, None, None, :]


def _rotated(sequence: torch.Tensor) -> torch.Tensor:
    """Halves of a head's width turned by the angle of their position: [s, n, d]."""
    angles = _angles(sequence.shape[0], sequence.device)[:, None, :].double()
    first, second = sequence.double().chunk(2, -1)
    turned = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
    return torch.cat(turned, -1).float()


def host_reads(bench: Bench) -> float:
    """A padded pack through a dense model in bf16, where torch refuses every operation that waits."""
    if bench.device.type != "cuda":
        raise NotProvable("only a GPU makes the host wait")
    sequences = texts((12, 24, 6))
    with bench.layout() as layout:
        model = layout.chunk(DENSE, dtype="bf16")
        reference = layout.trained(model, layout.single(sequences))
        batch = layout.packed(sequences, multiple=8)
        layout.trained(model, [batch])  # kernels are chosen and loaded
        model.zero_grad()
        torch.cuda.set_sync_debug_mode("error")
        try:
            seen = layout.trained(model, [batch])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return gap({"loss": seen["loss"]}, {"loss": reference["loss"]})
