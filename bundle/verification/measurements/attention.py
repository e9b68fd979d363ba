"""Attention over ranks: sinks, gates, given groups, latent attention, and the gated delta net beside it."""

from typing import Any

import torch

from bundle.mcore import attention
from bundle.mcore.attention import cross_attention, gated_delta_net
from bundle.mcore.groups import Groups
from bundle.verification.numbers import (
    DENSE,
    LATENT,
    YARN,
    Bench,
    Numbers,
    chunk,
    gap,
    packed,
    recipe,
    rows,
    run,
    single,
    stepped,
    texts,
    trained,
    worst,
)

_HEADS = 4  # of DENSE


def sinks(bench: Bench) -> float:
    """The gradient norm of a model with learned sinks, each with a gradient of its own."""
    norms = []
    for sizes in ({}, {"tp": 2}):
        with bench.layout(**sizes) as groups:
            model = chunk(bench, groups, DENSE)
            offsets = attention.with_sinks(model.config).to(bench.device)
            model.sinks = offsets
            weights = torch.arange(3.0, 3.0 + _HEADS, device=bench.device).chunk(groups.tp.size)[
                groups.tp.rank
            ]

            def add(
                _module: Any, _given: Any, losses: torch.Tensor, of: Any = offsets, by: Any = weights
            ) -> Any:
                return losses + (of.softmax_offset * by).sum()

            torch.nn.init.zeros_(offsets.softmax_offset)
            model.register_forward_hook(add)
            norms.append({"norm": stepped(bench, groups, recipe(DENSE, groups), model)})
    return gap(norms[1], norms[0])


def gated_output(bench: Bench) -> float:
    """The loss and the gradients of whole weights of gated attention whose ranks share a group of heads."""
    with bench.layout() as groups:
        reference = _gated(bench, groups)
    with bench.layout(tp=2) as groups:
        return gap(_gated(bench, groups), reference)


def given_ranks(bench: Bench) -> float:
    """How many rows of their weights the projections of cross attention have on one of two ranks."""
    with bench.layout() as groups:
        config = chunk(bench, groups, DENSE).config
        layer = cross_attention(config, torch.distributed.group.WORLD, groups.cp.group)
        half = config.num_attention_heads // 2 * config.kv_channels
        seen = [layer.linear_q.weight.shape[0], layer.linear_kv.weight.shape[0]]
        return gap({"rows": torch.tensor(seen).float()}, {"rows": torch.tensor([half, 2 * half]).float()})


def _gated(bench: Bench, groups: Groups) -> Numbers:
    options = {"attention_output_gate": True, "num_query_groups": 1, "sequence_parallel": False}
    model = chunk(bench, groups, DENSE, options)
    loss = run(model, rows(bench, groups, torch.stack(texts((16, 16))), torch.ones(2, 16)))
    loss.backward()
    norms = ("input_layernorm.weight", "pre_mlp_layernorm.weight", "final_layernorm.weight")
    whole = {name: x.grad for name, x in model.named_parameters() if name.endswith(norms)}
    return {"loss": loss.detach(), **whole}


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


_WHOLE = {"sequence_parallel": False}
# Weights of which each rank has all, and gets all of the gradient before anything is made final.
_BELOW = ("linear_kv_down_proj.weight", "linear_q_down_proj.weight", "input_layernorm.weight")


def rotary_key(bench: Bench) -> float:
    """The gradients of the down projections and of the norm below."""
    with bench.layout() as groups:
        reference = _gradients(bench, groups)
    with bench.layout(tp=2) as groups:
        return gap(_gradients(bench, groups), reference)


def query_norm(bench: Bench) -> float:
    """The norm of the gradients of the norms of compressed queries, where nothing else learns."""
    norms = []
    for sizes in ({}, {"tp": 2}):
        with bench.layout(**sizes) as groups:
            model = chunk(bench, groups, LATENT, _WHOLE)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name.endswith("q_layernorm.weight"))
            norms.append({"norm": stepped(bench, groups, recipe(LATENT, groups), model)})
    return gap(norms[1], norms[0])


def _gradients(bench: Bench, groups: Groups) -> Numbers:
    model = chunk(bench, groups, LATENT, _WHOLE)
    run(model, rows(bench, groups, torch.stack(texts((16, 16))), torch.ones(2, 16))).backward()
    return {name: x.grad for name, x in model.named_parameters() if name.endswith(_BELOW)}


def output_norm(bench: Bench) -> float:
    """The gradient of the norm that all heads share, against the sum over the heads of all ranks.

    By the formula of a weight that multiplies what has a mean square of 1.
    """
    with bench.layout(tp=2) as groups:
        config = chunk(bench, groups, DENSE).config
        layer = gated_delta_net(config).to(bench.device)
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
        torch.distributed.all_reduce(reference, group=groups.tp.group)
        return gap({"weight": layer.out_norm.weight.grad}, {"weight": reference})
