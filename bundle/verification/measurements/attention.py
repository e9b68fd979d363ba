"""Attention over two tensor-parallel ranks, against one rank."""

from typing import Any

import torch

from bundle.mcore import attention
from bundle.mcore.attention import cross_attention
from bundle.mcore.groups import Groups
from bundle.verification.bench import Bench
from bundle.verification.numbers import Numbers, gap, run, stepped
from bundle.verification.tiny import DENSE, chunk, recipe, rows, texts

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
