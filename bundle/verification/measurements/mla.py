"""Packed input of multi-latent attention, against one unpacked pass for each sequence."""

import torch

from bundle.verification.bench import Bench
from bundle.verification.numbers import gap, trained, worst
from bundle.verification.tiny import LATENT, YARN, chunk, packed, single, texts


def packed_over_ranks(bench: Bench) -> float:
    """Three padded sequences on two context-parallel ranks, with both classes of rotary embedding."""
    sequences = texts((12, 24, 6))
    gaps = []
    for config, rotary in ((LATENT, "rope"), (LATENT | YARN, "yarn")):
        embedding = {"rope_type": rotary}
        with bench.layout() as groups:
            model = chunk(bench, groups, config, embedding)
            reference = trained(model, groups, single(bench, groups, sequences))
        with bench.layout(cp=2) as groups:
            batch = packed(bench, groups, sequences, multiple=8)
            gaps.append(gap(trained(chunk(bench, groups, config, embedding), groups, [batch]), reference))
    return worst(gaps)


def uncompressed_queries(bench: Bench) -> float:
    """Queries straight from the hidden state, against the product with the same weights and nothing else."""
    with bench.layout() as groups:
        model = chunk(bench, groups, LATENT | {"q_lora_rank": None}, {"apply_rope_fusion": False})
        attention = model.decoder.layers[0].self_attention
        hidden = 3 * torch.randn(6, 1, attention.config.hidden_size, device=bench.device)
        seen = {"queries": attention.linear_q_proj(hidden)[0]}
        return gap(seen, {"queries": hidden @ attention.linear_q_proj.weight.t()})


def narrow_values(bench: Bench) -> float:
    """Value heads narrower than query heads, for a kernel that takes packed input of one width only."""
    sequences = texts((12, 24, 6))
    with bench.layout() as groups:
        model = chunk(bench, groups, LATENT, attention="flash")
        reference = trained(model, groups, single(bench, groups, sequences))
        model.zero_grad()
        return gap(trained(model, groups, [packed(bench, groups, sequences, multiple=8)]), reference)
