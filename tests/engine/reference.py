"""What an engine should compute, from megatron's own model: one unpacked sequence at a time, on one rank."""

import torch
import torch.nn.functional as F

from bundle.models import naming
from bundle.verification.numbers import VOCABULARY_SIZE, Bench, Numbers
from tests.engine.balanced import Balance, hear, term
from tests.reference import losses
from tests.reference.texts import Text
from tests.reference.texts import texts as drawn


def texts(lengths: tuple[int, ...], learned: float = 0.7) -> list[Text]:
    """Sequences for the tiny models."""
    return drawn(lengths, VOCABULARY_SIZE, learned=learned)


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
    with bench.open_layout() as groups:
        model = groups.build_chunk(config, mtp={"layers": depths})
        heard = hear(model)
        total, found = losses.computed(
            lambda text: _logits(model, text),
            sequences,
            depths=depths,
            scale=scale,
            mean=mean,
            objective=objective,
        )
        if balance is not None:
            total = total + term(heard, balance)
        total.backward()
        for named in naming.find_parameters(model, groups):
            if named.parameter.grad is not None:
                found[named.name] = named.parameter.grad
    return found


def _logits(model: torch.nn.Module, text: Text) -> list[torch.Tensor]:
    """The logits [n, v] of the main head, then of each depth."""
    seen = []

    def record(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits[:, 0, :VOCABULARY_SIZE])  # no token is called what the other rows are
        return torch.zeros(labels.shape)  # no gradient of megatron's own

    model.compute_language_model_loss = record
    positions = torch.arange(len(text.mask))[None]
    ids, labels = F.pad(text.tokens, (0, 0))[None, :-1], text.tokens[None, 1:]
    model(ids, positions, None, labels=labels, loss_mask=text.mask[None])
    *later, main = seen  # megatron asks for the losses of multi-token prediction first
    return [main, *later]
