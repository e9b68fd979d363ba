"""What models are given in numeric tests: sequences with prompts, gaps, and what an objective reads."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Text:
    """A sequence of tokens [n + 1], which of the n predictions are learned, and what an objective reads."""

    tokens: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    temperature: float


def texts(lengths: tuple[int, ...], vocabulary: int, *, learned: float = 0.7) -> list[Text]:
    """Sequences with a prompt that is not learned and gaps; the second one is learned nowhere."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for place, n in enumerate(lengths):
        tokens = torch.randint(1, vocabulary, (n + 1,), generator=generator)
        mask = (torch.rand(n, generator=generator) > 1 - learned).float()
        mask[: n // 4] = 0
        if place == 1:
            mask.zero_()
        found.append(Text(tokens, mask, torch.randn(n, generator=generator), 0.7 + 0.2 * place))
    return found
