"""What an engine should compute, written plainly: one unpacked sequence at a time, on one rank."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bundle.models import naming
from bundle.verification.bench import Bench
from bundle.verification.numbers import Numbers
from bundle.verification.tiny import VOCABULARY, chunk
from tests.engine.balanced import Balance, hear, term

ENTROPY = 0.1  # its weight in the objective


@dataclass(frozen=True)
class Text:
    """A sequence of tokens [n + 1], which of the n predictions are learned, and what an objective reads."""

    tokens: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    temperature: float


def texts(lengths: tuple[int, ...], learned: float = 0.7) -> list[Text]:
    """Sequences with a prompt that is not learned and gaps; the second one is learned nowhere."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for place, n in enumerate(lengths):
        tokens = torch.randint(1, VOCABULARY, (n + 1,), generator=generator)
        mask = (torch.rand(n, generator=generator) > 1 - learned).float()
        mask[: n // 4] = 0
        if place == 1:
            mask.zero_()
        found.append(Text(tokens, mask, torch.randn(n, generator=generator), 0.7 + 0.2 * place))
    return found


def scores(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities, entropies) [n] of logits [n, v]."""
    log_p = (logits.double() / temperature).log_softmax(-1)
    return log_p.gather(-1, labels[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def computed(
    bench: Bench,
    config: dict,
    sequences: list[Text],
    *,
    depths: int = 0,
    scale: float = 0.1,
    mean: str = "token",
    objective: bool = False,
    balance: Balance | None = None,
) -> Numbers:
    """Losses, scores of each sequence and every gradient of the whole model."""
    sums = torch.zeros(1 + depths, dtype=torch.float64)
    weights = torch.zeros(1 + depths, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    found: Numbers = {}
    learned = sum(float(text.mask.sum()) for text in sequences)
    divisor = learned if mean == "token" else sum(float(text.mask.any()) for text in sequences)
    with bench.layout() as groups:
        model = chunk(bench, groups, config, mtp={"layers": depths})
        heard = hear(model)
        for place, text in enumerate(sequences):
            n = len(text.mask)
            share = text.mask.double() / (1 if mean == "token" else text.mask.sum().clamp(min=1))
            # MTP first, in the order of depths, then the main head.
            *later, main = _logits(model, text)
            log_probs, entropy = scores(main, text.tokens[1:], text.temperature if objective else 1.0)
            with torch.no_grad():
                tempered = scores(main, text.tokens[1:], text.temperature)
            found |= {f"log-probs {place}": tempered[0], f"entropy {place}": tempered[1]}
            loss = -log_probs
            if objective:
                loss = -text.advantages * log_probs - ENTROPY * entropy
            terms = [(loss * share).sum()]
            weights[0] += share.sum()
            for depth, logits in enumerate(later, start=1):
                ahead = scores(logits[: n - depth], text.tokens[1 + depth :], 1.0)[0]
                terms.append(-(ahead * share[depth:]).sum())
                weights[depth] += share[depth:].sum()
            sums += torch.stack(terms).detach()
            total = total + terms[0] + scale / max(1, depths) * sum(terms[1:])
        total = total / divisor
        if balance is not None:
            total = total + term(heard, balance)
        total.backward()
        found |= {f"loss {k}": value for k, value in enumerate(sums / weights)}
        for named in naming.parameters(model, groups):
            if named.parameter.grad is not None:
                found[named.name] = named.parameter.grad
    return found


def _logits(model: torch.nn.Module, text: Text) -> list[torch.Tensor]:
    """The logits [n, v] of every head, in the order in which megatron asks for their losses."""
    seen = []

    def record(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits[:, 0, :VOCABULARY])  # no token is called what the other rows are
        return torch.zeros(labels.shape)  # no gradient of megatron's own

    model.compute_language_model_loss = record
    positions = torch.arange(len(text.mask))[None]
    ids, labels = F.pad(text.tokens, (0, 0))[None, :-1], text.tokens[None, 1:]
    model(ids, positions, None, labels=labels, loss_mask=text.mask[None])
    return seen
