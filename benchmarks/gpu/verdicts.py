"""What must hold between the curves, as data, and whether it does."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from benchmarks.gpu.cases import MEMORY
from benchmarks.gpu.run import Run

Runs = Mapping[str, Run]


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds for these runs, and the numbers."""

    holds: bool
    claim: str
    seen: str


class Claim(Protocol):
    """Something that the runs it names must fulfil."""

    @property
    def needs(self) -> tuple[str, ...]: ...

    def judge(self, runs: Runs) -> Verdict: ...


@dataclass(frozen=True)
class Falls:
    """The main loss of the last step is below `share` of the first one's."""

    run: str
    share: float

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.run,)

    def judge(self, runs: Runs) -> Verdict:
        first, last = (runs[self.run].losses[step][0] for step in (0, -1))
        claim = f"{self.run}: the loss falls below {self.share:.0%} of the first"
        return Verdict(last < self.share * first, claim, f"{first:.4f} to {last:.4f}")


@dataclass(frozen=True)
class Near:
    """Main and MTP losses of the first `steps` steps differ by no more than `nats` from the reference's."""

    run: str
    reference: str
    steps: int
    nats: float

    @property
    def needs(self) -> tuple[str, ...]:
        return self.run, self.reference

    def judge(self, runs: Runs) -> Verdict:
        gap = largest_gap(runs[self.run], runs[self.reference], self.steps)
        claim = f"{self.run}: within {self.nats:g} of {self.reference} for {self.steps} steps"
        return Verdict(gap <= self.nats, claim, f"{gap:.1e}")


@dataclass(frozen=True)
class Far:
    """The control: these losses leave the reference's by more than `nats`, so that `Near` can tell."""

    run: str
    reference: str
    steps: int
    nats: float

    @property
    def needs(self) -> tuple[str, ...]:
        return self.run, self.reference

    def judge(self, runs: Runs) -> Verdict:
        gap = largest_gap(runs[self.run], runs[self.reference], self.steps)
        claim = f"{self.run}: more than {self.nats:g} from {self.reference} within {self.steps} steps"
        return Verdict(gap > self.nats, claim, f"{gap:.1e}")


@dataclass(frozen=True)
class SameGradient:
    """The gradient norm of the first step differs by no more than `share` of the reference's."""

    run: str
    reference: str
    share: float

    @property
    def needs(self) -> tuple[str, ...]:
        return self.run, self.reference

    def judge(self, runs: Runs) -> Verdict:
        mine, theirs = (runs[name].grad_norms[0] for name in self.needs)
        off = abs(mine - theirs) / theirs
        claim = f"{self.run}: the first gradient is within {self.share:g} of that of {self.reference}"
        return Verdict(off <= self.share, claim, f"{mine:.5f} and {theirs:.5f}, {off:.1e}")


@dataclass(frozen=True)
class OtherGradient:
    """The control: the gradient norm of the first step is more than `times` the reference's."""

    run: str
    reference: str
    times: float

    @property
    def needs(self) -> tuple[str, ...]:
        return self.run, self.reference

    def judge(self, runs: Runs) -> Verdict:
        mine, theirs = (runs[name].grad_norms[0] for name in self.needs)
        claim = f"{self.run}: the first gradient is more than {self.times:g} times that of {self.reference}"
        return Verdict(mine > self.times * theirs, claim, f"{mine:.5f} and {theirs:.5f}")


@dataclass(frozen=True)
class AsPlanned:
    """The peak of the device's memory differs by no more than `share` from what the plan says."""

    run: str
    share: float

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.run,)

    def judge(self, runs: Runs) -> Verdict:
        peak, planned = runs[self.run].peak_bytes, runs[self.run].planned_bytes
        seen = f"{peak / 2**30:.2f} of {planned / 2**30:.2f} GiB, {peak / planned - 1:+.1%}"
        return Verdict(abs(peak / planned - 1) <= self.share, f"{self.run}: the peak is as planned", seen)


def largest_gap(one: Run, other: Run, steps: int) -> float:
    """The largest difference of any loss in the first `steps` steps; infinity where one is not a number."""
    pairs = [
        abs(a - b)
        for mine, theirs in zip(one.losses[:steps], other.losses[:steps], strict=True)
        for a, b in zip(mine, theirs, strict=True)
    ]
    return max(gap if gap == gap else float("inf") for gap in pairs)


_TRAINED = ("bf16", "bf16 packed", "bf16 gqa")
_QUANTISED = {
    "delayed": "bf16",
    "tensorwise": "bf16",
    "blockwise": "bf16",
    "blockwise packed": "bf16 packed",
    "blockwise gqa": "bf16 gqa",
}
_EMULATED = ("delayed", "tensorwise", "blockwise")
_EXACT = ("fp32", "fp32 gqa", "fp32 yarn", "fp32 yarn packed")
_LAYOUTS = ("fp32 tp2", "fp32 tp2 etp1 ep2", "fp32 ep2", "fp32 pp2")

# What adam keeps in other types, and on the host.
_KEPT = ("bf16 precision-aware", "bf16 moments", "bf16 offloaded", "bf16 half offloaded")
# Adapters beside frozen weights: on a GPU as on the cpu, over two ranks as on one.
_ADAPTED = ("fp32 lora", "fp32 gqa lora")
_ADAPTED_LAYOUTS = ("fp32 lora tp2", "fp32 lora tp2 etp1 ep2", "fp32 lora ep2", "fp32 lora pp2")

CLAIMS: tuple[Claim, ...] = (
    *(Falls(run, 0.6) for run in (*_TRAINED, *_QUANTISED)),
    *(Near(run, f"{run} on cpu", steps=2, nats=0.001) for run in _EXACT),
    *(SameGradient(run, f"{run} on cpu", 1e-4) for run in _EXACT),
    *(Near(run, f"{run} on cpu", steps=5, nats=0.001) for run in _ADAPTED),
    *(SameGradient(run, f"{run} on cpu", 1e-4) for run in _ADAPTED),
    Near("bf16 lora", "bf16 lora on cpu", steps=5, nats=0.01),
    Near("tensorwise lora", "tensorwise lora on cpu", steps=5, nats=0.02),
    Near("tensorwise lora", "bf16 lora", steps=5, nats=0.1),
    Far("tensorwise lora", "bf16 lora", steps=5, nats=0.01),
    Far("fp32 lora", "fp32", steps=5, nats=0.01),
    *(Near(run, "fp32 lora", steps=5, nats=0.001) for run in _ADAPTED_LAYOUTS),
    *(SameGradient(run, "fp32 lora", 1e-4) for run in _ADAPTED_LAYOUTS),
    Near("fp32 undivided", "fp32", steps=5, nats=0.001),
    Near("bf16 undivided", "bf16", steps=3, nats=0.01),
    *(Near(run, "bf16", steps=10, nats=0.02) for run in _KEPT),
    *(Falls(run, 0.6) for run in _KEPT),
    Near("fp32 sgd", "fp32 sgd on cpu", steps=5, nats=0.001),
    Near("bf16 sgd", "bf16 sgd on cpu", steps=3, nats=0.01),
    Far("fp32 sgd", "fp32", steps=5, nats=0.1),
    *(Near(run, f"{run} on cpu", steps=2, nats=0.01) for run in _TRAINED),
    # Afterwards the loss falls over a ledge, a little earlier in one run than in the other.
    *(Near(run, reference, steps=15, nats=0.1) for run, reference in _QUANTISED.items()),
    *(Near(f"{run} on cpu", "bf16 on cpu", steps=5, nats=0.1) for run in _EMULATED),
    *(Near(run, f"{run} on cpu", steps=2, nats=0.1) for run in _EMULATED),
    Far("blockwise, first weights kept", "bf16", steps=15, nats=0.5),
    *(Near(run, "fp32", steps=5, nats=0.001) for run in _LAYOUTS),
    *(SameGradient(run, "fp32", 1e-4) for run in _LAYOUTS),
    # The losses that balance experts: on a GPU as on the cpu, over two ranks as on one.
    *(OtherGradient(f"{dtype} balanced", dtype, 2) for dtype in ("fp32", "bf16")),
    *(SameGradient(run, f"{run} on cpu", 1e-4) for run in ("fp32 balanced", "fp32 balanced packed")),
    *(SameGradient(f"{run} tp2", run, 1e-4) for run in ("fp32 balanced", "fp32 balanced packed")),
    *(SameGradient(f"{run} cp2", run, 0.02) for run in ("bf16 balanced", "bf16 balanced packed")),
    Near("bf16 cp2", "bf16", steps=5, nats=0.01),
    Near("bf16 packed cp2", "bf16 packed", steps=5, nats=0.01),
    Near("blockwise tp2 etp1 ep2", "blockwise", steps=5, nats=0.02),
    *(
        Near(f"{scaling} {layout}2", scaling, steps=5, nats=0.02)
        for scaling in ("blockwise", "tensorwise")
        for layout in ("tp", "pp", "ep")
    ),
    Near("blockwise packed cp2", "blockwise packed", steps=5, nats=0.02),
    *(AsPlanned(case.name, 0.05) for case in MEMORY),
)


def judge(runs: Runs) -> list[Verdict]:
    """The verdict on every claim whose runs are there."""
    return [claim.judge(runs) for claim in CLAIMS if set(claim.needs) <= set(runs)]
