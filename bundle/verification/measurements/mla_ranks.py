"""Latent attention over two tensor-parallel ranks that hold the whole sequence each, against one rank."""

import torch

from bundle.mcore.groups import Groups
from bundle.verification.bench import Bench
from bundle.verification.numbers import Numbers, gap, run, stepped
from bundle.verification.tiny import LATENT, chunk, recipe, rows, texts

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
