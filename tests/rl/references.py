"""Every loss and estimator of a policy once more, in float64, for one whole unpadded answer at a time.

Written from the papers, by hand-made gradients where that is short; shares no code with `bundle.rl`.
"""

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

LIMIT = 20.0


@dataclass(frozen=True)
class Case:
    """A policy's loss in plain numbers; `level` None: no correction."""

    kind: str = "ppo"
    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    entropy: float = 0.0
    kl: float = 0.0
    kl_kind: str = "k2"
    correction: str | None = None
    level: str = "token"
    bounds: tuple[float, float] = (0.0, 2.0)
    veto: float | None = None
    mean: str = "token"
    divisor: float | None = None


@dataclass
class Answer:
    """What is known of the n predictions of a sequence; those of the prompt, and gaps, are not `learned`."""

    tokens: Tensor  # [n + 1]
    learned: Tensor  # [n] bool
    advantages: Tensor
    old: Tensor
    rollout: Tensor
    reference: Tensor
    log_probs: Tensor = field(default_factory=lambda: torch.zeros(0))
    entropy: Tensor = field(default_factory=lambda: torch.zeros(0))


def draw(lengths: tuple[int, ...], seed: int, *, spread: float = 0.3, vocabulary: int = 50) -> list[Answer]:
    """Answers with a prompt and gaps; the last but one is learned nowhere. What is not learned is garbage."""
    g = torch.Generator().manual_seed(seed)
    answers = []
    for place, n in enumerate(lengths):
        learned = torch.rand(n, generator=g) > 0.2
        learned[: n // 4] = False
        learned[-1] = True
        if place == len(lengths) - 2:
            learned[:] = False
        log_probs = -2 * torch.rand(n, generator=g).double()
        old, rollout, reference = (
            (log_probs + spread * torch.randn(n, generator=g).double()).where(learned, garbage)
            for garbage in (-math.inf, math.nan, math.inf)
        )
        advantages = torch.randn((), generator=g).double().expand(n).clone()
        if place % 3 == 2:
            advantages = torch.randn(n, generator=g).double()  # REINFORCE++ has one for each token
        answers.append(
            Answer(
                torch.randint(1, vocabulary, (n + 1,), generator=g),
                learned,
                advantages.where(learned, math.nan),
                old,
                rollout,
                reference,
                log_probs,
                torch.rand(n, generator=g).double(),
            )
        )
    return answers


def compute_answer(case: Case, answer: Answer) -> tuple[Tensor, dict[str, Tensor]]:
    """The losses [m] of the learned tokens of one answer, and what is measured of them."""
    keep = answer.learned
    lp, old, roll, ref, adv, entropy = (
        one[keep].double()
        for one in (
            answer.log_probs,
            answer.old,
            answer.rollout,
            answer.reference,
            answer.advantages,
            answer.entropy,
        )
    )
    change = lp - old
    ratio = torch.exp(change.clamp(-LIMIT, LIMIT))
    if case.kind == "gspo":
        mean = change.sum() / max(1, len(change))
        ratio = torch.exp(mean).expand_as(lp)
        if len(adv.unique()) > 1:  # the token form: its value is the sequence's ratio, its gradient its own
            ratio = torch.exp(mean.detach()) * torch.exp(lp - lp.detach())
    bottom, top = 1 - case.low, 1 + case.high
    measures = {"ratio/max": ratio.detach(), "entropy": entropy.detach()}
    if case.kind == "cispo":
        loss = -ratio.detach().clamp(bottom, top) * adv * lp
        measures |= {
            "clip_fraction/low": (ratio < bottom).double(),
            "clip_fraction/high": (ratio > top).double(),
        }
    else:
        pairs = [_clip(r, a, bottom, top, case.dual) for r, a in zip(ratio, adv, strict=True)]
        loss = torch.stack([one for one, _ in pairs]) if pairs else lp * 0
        for name in ("low", "high", "dual"):
            is_bound = [float(name == why) for _, why in pairs]
            measures[f"clip_fraction/{name}"] = torch.tensor(is_bound).double()
        if case.dual is None:
            del measures["clip_fraction/dual"]
    measures["approx_kl"] = torch.exp(change.detach()) - 1 - change.detach()
    gap = old - roll
    measures["mismatch/k3"] = torch.exp(gap) - 1 - gap
    measures["mismatch/log_prob_difference"] = gap.abs()
    measures["mismatch/max_log_prob_difference"] = gap.abs()
    if case.correction:
        weight, clipped, vetoed = _correct(case, gap)
        loss = loss * weight
        measures |= {
            "correction/weight": weight,
            "correction/square": weight**2,
            "correction/clip_fraction": clipped.double(),
            "correction/veto_fraction": vetoed.double(),
        }
    loss = loss - case.entropy * entropy
    if case.kl:
        d = lp - ref
        kl = d**2 / 2 if case.kl_kind == "k2" else torch.exp(-d) - 1 + d
        loss = loss + case.kl * kl
        measures["kl"] = kl.detach()
    return loss, measures


def _clip(
    ratio: Tensor, adv: Tensor, bottom: float, top: float, dual: float | None
) -> tuple[Tensor, str | None]:
    """The loss of one token by cases, and which bound makes its gradient 0."""
    if adv > 0:
        return (-top * adv, "high") if ratio > top else (-ratio * adv, None)
    if adv < 0 and ratio < bottom:
        return -bottom * adv, "low"
    if adv < 0 and dual is not None and ratio > dual:
        return -dual * adv, "dual"
    return -ratio * adv, None


def _correct(case: Case, gap: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    log_weight = gap
    if case.level == "sequence":
        log_weight = gap.sum().expand_as(gap)
    if case.level == "geometric":
        log_weight = (gap.sum() / max(1, len(gap))).expand_as(gap)
    weight = torch.exp(log_weight.clamp(-LIMIT, LIMIT))
    low, high = case.bounds
    if case.correction == "truncate":
        clipped, weight = weight > high, torch.where(weight > high, high, weight)
    else:
        inside = (weight >= low) & (weight <= high)
        clipped, weight = ~inside, (inside.double() if case.level == "geometric" else weight * inside)
    vetoed = torch.zeros_like(clipped)
    if case.veto is not None and bool((torch.exp(gap) < case.veto).any()):
        vetoed, weight = torch.ones_like(clipped), weight * 0
    return weight, clipped, vetoed


def compute(case: Case, answers: list[Answer]) -> tuple[Tensor, dict[str, float]]:
    """The loss that is differentiated, and every measure over all answers."""
    parts = [compute_answer(case, answer) for answer in answers]
    parts = [(loss, measures) for loss, measures in parts if len(loss)]
    if case.divisor is not None:
        total = torch.cat([loss for loss, _ in parts]).sum() / case.divisor
    elif case.mean == "token":
        total = torch.cat([loss for loss, _ in parts]).mean()
    else:
        total = torch.stack([loss.mean() for loss, _ in parts]).mean()
    measures = {}
    for name in parts[0][1]:
        values = [one[name] for _, one in parts]
        if name in ("ratio/max", "mismatch/max_log_prob_difference"):
            measures[name] = float(torch.cat(values).max())
        elif case.mean == "token":
            measures[name] = float(torch.cat(values).mean())
        else:
            measures[name] = float(torch.stack([one.mean() for one in values]).mean())
    return total, measures


def track(answers: list[Answer]) -> list[Answer]:
    """The same answers, whose log-probabilities and entropies have gradients."""
    return [
        replace(
            one,
            log_probs=one.log_probs.clone().requires_grad_(),
            entropy=one.entropy.clone().requires_grad_(),
        )
        for one in answers
    ]
