"""Losses over a vocabulary that two ranks share, against the same loss over all of it."""

import torch

from bundle.mcore.gpt import smoothed_cross_entropy
from bundle.verification.bench import Bench
from bundle.verification.numbers import gap, gradients, run
from bundle.verification.tiny import DENSE, chunk, rows, texts

_SMOOTHING = 0.3


def label_smoothing(bench: Bench) -> float:
    """Loss and gradient of smoothed labels, against the formula over all columns."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(6, 2, 10, generator=generator).mul(3).to(bench.device).requires_grad_()
    labels = torch.randint(0, 10, (6, 2), generator=generator).to(bench.device)
    weights = torch.rand(6, 2, generator=generator).to(bench.device)
    wanted = torch.full_like(logits, _SMOOTHING / 9).scatter(-1, labels[..., None], 1 - _SMOOTHING)
    loss = -(wanted * logits.log_softmax(-1)).sum(-1)
    (loss * weights).sum().backward()
    with bench.layout(tp=2) as groups:
        own = logits.detach().chunk(2, -1)[groups.tp.rank].clone().requires_grad_()
        seen = smoothed_cross_entropy(own * 1.0, labels, _SMOOTHING)
        (seen * weights).sum().backward()
        whole = logits.grad.chunk(2, -1)[groups.tp.rank]  # type: ignore[union-attr]
        return gap({"loss": seen.detach(), "gradient": own.grad}, {"loss": loss.detach(), "gradient": whole})


def gathered_logits(bench: Bench) -> float:
    """Loss and gradients of a model that gathers its logits, against those of one that does not."""
    with bench.layout(tp=2) as groups:
        batch = rows(bench, groups, torch.stack(texts((16, 16))), torch.ones(2, 16))
        seen = []
        for gather in (True, None):
            # 0.12 gathers nothing where ranks share the sequence
            model = chunk(bench, groups, DENSE, {"sequence_parallel": False})
            loss = run(model, batch, runtime_gather_output=gather)
            loss.backward()
            seen.append({"loss": loss.detach(), **gradients(model, groups)})
        return gap(*seen)
