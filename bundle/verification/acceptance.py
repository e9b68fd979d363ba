"""Whether an accelerator may be relied on: what a job asks of it, done once, beside what it should come to.

`mcore-bundle doctor --acceptance`: environment, operators, collectives, five steps, a checkpoint, patches.
Each runs in processes of its own and says what it saw, so that none keeps another from being seen.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bundle import capabilities
from bundle.environment import compatibility
from bundle.environment.doctor import AUTOLOAD
from bundle.environment.machine import Finding, Hardware, Level, fail, ok, plain, spoken
from bundle.environment.packages import Stack
from bundle.preflight import Found
from bundle.verification import Order, decide, everything, observed

COMMAND = "mcore-bundle doctor --acceptance"
PROGRAM = "bundle"  # what `python -m` runs for a verb
PATCHES: tuple[str, ...] = ()  # that are verified; without any, all that apply
# Types that collectives add up and move. torch-npu's ProcessGroupHCCL also adds up int16, and float64 on
# Atlas A5 alone: the engine asks for neither.
REDUCED = ("int8", "int32", "int64", "float16", "bfloat16", "float32")
MOVED = (*REDUCED, "uint8", "bool", "float64")
STEPS, BEFORE = 5, 3  # of training, and until the checkpoint that is gone on from
# The largest relative distance of a loss from the cpu's after five steps; on an H200 it was 5e-7 in fp32.
LOSSES = {"fp32": 1e-4, "bf16": 1e-2}
RESUMED = 1e-5  # of an unbroken run's: kernels may add in another order
_SECONDS = 3600.0  # that a verb may take


class Operator(NamedTuple):
    """An operator of the accelerator, and what measures it ("package.module:function")."""

    name: str  # in capabilities: of an attention kernel, or of an operator
    measurement: str


def _operator(name: str, function: str) -> Operator:
    return Operator(name, f"bundle.verification.measurements.operators:{function}")


# By backend. On cuda layers are Transformer Engine's and on the cpu torch's own: losses stand for them.
OPERATORS: Mapping[str, tuple[Operator, ...]] = {
    "ascend": (
        _operator("flash", "attention"),
        _operator("rms_norm", "rms_norm"),
        _operator("swiglu", "swiglu"),
        _operator("rotary", "rotary"),
        _operator("permute", "permute"),
        _operator("grouped_experts", "grouped_experts"),
        _operator("adamw", "adamw"),
    )
}
COLLECTIVES = "bundle.verification.measurements.collectives:exchanged"


class Part(NamedTuple):
    """A part of the acceptance, and what it came to."""

    name: str
    found: Found

    def finding(self, runs: Path) -> Finding:
        """As people read it; `runs` is where its runs lie."""
        found = self.found
        measured = ", ".join(f"{value:.2g} {unit}" for unit, value in found.measured.items())
        told = "; ".join(filter(None, (measured, found.said, found.skipped and f"skipped: {found.skipped}")))
        if found.wrong:
            return fail(self.name, found.wrong, f"see {runs}, and send the output of --json with a report")
        return ok(self.name, told or found.status)


def accept(hardware: Hardware, findings: Sequence[Finding], directory: Path) -> Iterator[Part]:
    """The parts, each as soon as it is known; an environment that is unfit is the only one.

    `findings` are doctor's; `directory` is empty, for runs.
    """
    environment = _environment(findings)
    yield Part("environment", environment)
    if environment.wrong:
        return
    backend, ranks = hardware.backend, len(hardware.devices) or 2
    for operator in OPERATORS.get(backend, ()):
        yield Part(f"operator {operator.name}", _timed(partial(_operator_found, operator, backend)))
    yield Part("collectives", _timed(partial(collectives, backend, ranks)))
    trained = _Trained(backend, directory)
    for dtype, most in LOSSES.items():
        yield Part(f"five steps in {dtype}", _timed(partial(trained.beside_the_cpu, dtype, most)))
    yield Part("checkpoint", _timed(trained.gone_on))
    yield Part("two ranks", _timed(partial(trained.split, ranks)))
    yield Part("patches", _timed(partial(_patches, backend)))


def document(hardware: Hardware, installed: Stack, parts: Sequence[Part]) -> dict[str, Any]:
    """What the parts came to, as JSON can hold it; `combination` is for docs/compatibility.md.

    That is None where a part failed. A device that is called emulated is none, and the document says so.
    """
    device = hardware.devices[0] if hardware.devices else None
    name = device.name if device else hardware.backend
    passed = not any(part.found.wrong for part in parts)
    proven = [
        f"{part.name}: {part.found.said}" if part.found.said else part.name
        for part in parts
        if part.found.status == "passed"
    ]
    seen = None
    if passed:
        command = f"{COMMAND} --backend {hardware.backend}"
        seen = compatibility.observed(installed, hardware.backend, name, proven, command)
    return {
        "schema": 1,
        "backend": hardware.backend,
        "device": name,
        "devices": len(hardware.devices),
        "emulated": compatibility.emulated(name),
        "driver": plain(hardware.driver),
        "toolkit": plain(hardware.toolkit),
        "passed": passed,
        "parts": [
            {
                "name": part.name,
                "status": part.found.status,
                "seconds": part.found.seconds,
                "measured": dict(part.found.measured),
                "cause": part.found.wrong or part.found.skipped or part.found.said,
            }
            for part in parts
        ],
        "combination": seen.model_dump(mode="json") if seen else None,
    }


def _timed(run: Callable[[], Found]) -> Found:
    began = time.monotonic()
    return replace(run(), seconds=round(time.monotonic() - began, 1))


def _environment(findings: Iterable[Finding]) -> Found:
    wrong = [f"{finding.subject}: {finding.cause}" for finding in findings if finding.level is Level.FAIL]
    return Found(wrong="; ".join(wrong))


def _operator_found(operator: Operator, backend: str) -> Found:
    seen = _measured(Order(0, operator.measurement, 1, 300, ()), backend)
    if isinstance(seen, str):
        return Found(wrong=seen)
    measured = {"of the tolerance": seen}
    far = f"values or gradients are {seen:.3g} times what is allowed away from the reference"
    return Found(measured, wrong="" if seen <= 1 else far)


def collectives(backend: str, ranks: int) -> Found:
    if ranks < 2:
        return Found(skipped="takes two devices")
    name = capabilities.of(backend).collectives
    seen = _measured(Order(0, COLLECTIVES, 2, 600, ()), backend)
    said = f"{name} adds up {', '.join(REDUCED)} and moves {', '.join(MOVED)}"
    return Found(wrong=seen) if isinstance(seen, str) else Found(said=said)


def _measured(order: Order, backend: str) -> float | str:
    """What the ranks measured at most, or what went wrong."""
    found = decide(backend)
    ((_, answers),) = observed([order], everything(found), backend=backend, root=found.subject.root)
    gaps = [seen.gap for seen in answers if seen.gap is not None]
    if len(gaps) < len(answers) or not gaps:
        return " | ".join(dict.fromkeys(str(seen) for seen in answers if seen.gap is None))
    return _worst(gaps)


def _worst(gaps: Iterable[float]) -> float:
    """The largest; what is not a number is worse."""
    return max(gaps, key=lambda gap: (gap != gap, gap), default=math.nan)


_CPU, _DEVICE = "reference", "device"  # runs: of the cpu, and of one device
Losses = Mapping[int, Mapping[str, float]]  # step -> name -> value


class _Trained:
    """The demo (latent attention, experts, multi-token prediction), a few steps in several places."""

    def __init__(self, backend: str, directory: Path) -> None:
        self.backend, self.directory = backend, directory

    def beside_the_cpu(self, dtype: str, most: float) -> Found:
        """The losses of one device beside those of the cpu."""
        wrong = self._run(_CPU, dtype, "cpu") or self._run(_DEVICE, dtype, self.backend)
        if wrong:
            return Found(wrong=wrong)
        return judged(self._losses(_DEVICE, dtype), self._losses(_CPU, dtype), most, "the cpu's")

    def gone_on(self) -> Found:
        """The last steps from a checkpoint beside those of the run that wrote it."""
        return self._from_checkpoint("resumed", ranks=1, most=RESUMED)

    def split(self, ranks: int) -> Found:
        """The same on two devices that share every layer: two of tensor parallelism, with sequences."""
        if ranks < 2:
            return Found(skipped="takes two devices")
        return self._from_checkpoint("split", ranks=2, most=LOSSES["fp32"], more=("parallel.tp=2",))

    def _from_checkpoint(self, name: str, *, ranks: int, most: float, more: Sequence[str] = ()) -> Found:
        folder = self._folder(_DEVICE, "fp32") / "checkpoints"
        saved = sorted(folder.glob("step-*"))
        if not saved:
            return Found(wrong="the run in fp32 has left no checkpoint")
        wrong = self._run(name, "fp32", self.backend, ranks=ranks, origin=saved[0], more=more)
        if wrong:
            return Found(wrong=wrong)
        whole = self._losses(_DEVICE, "fp32")
        last = {step: whole[step] for step in whole if step > BEFORE}
        return judged(self._losses(name, "fp32"), last, most, "the unbroken run's")

    def _folder(self, name: str, dtype: str) -> Path:
        return self.directory / f"{name}-{dtype}"

    def _losses(self, name: str, dtype: str) -> Losses:
        return losses((self._folder(name, dtype) / "metrics.jsonl").read_text("utf-8"))

    def _run(
        self,
        name: str,
        dtype: str,
        backend: str,
        *,
        ranks: int = 1,
        origin: Path | None = None,
        more: Sequence[str] = (),
    ) -> str:
        """Trains; returns what went wrong."""
        sets = (
            f"model.dtype={dtype}", "model.config.num_hidden_layers=2", f"train.steps={STEPS}",
            "train.micro_batch_size=2", "train.global_batch_size=4", "train.eval_interval=0",
            "train.eval_batches=1", "train.log_interval=1", "optimizer.warmup_steps=0", "parallel.ep=1",
            f"checkpoint.interval={BEFORE}", *more,
        )  # fmt: skip
        words = ["--backend", backend, "--devices-per-node", str(ranks)]
        words += ["--run-directory", str(self._folder(name, dtype))]
        words += [] if origin is None else ["--from", str(origin)]
        words += [word for each in sets for word in ("--set", each)]
        # The cpu has no use for the library of another device, which torch would load; and fp32 is no TF32.
        environ = {"NVIDIA_TF32_OVERRIDE": "0"} | ({AUTOLOAD: "0"} if backend == "cpu" else {})
        code, said, last = _verb(["train", "demo", *words], environ)
        return "" if code == 0 else f"training on {backend} ended with {code}: {last or said}"


def losses(metrics: str) -> Losses:
    """The losses in the lines of a run's metrics; a step that was validated has two lines."""
    found: dict[int, dict[str, float]] = {}
    for line in metrics.splitlines():
        row = json.loads(line)
        found.setdefault(row["step"], {}).update({k: v for k, v in row.items() if k.endswith("loss")})
    return found


def judged(seen: Losses, expected: Losses, most: float, whose: str) -> Found:
    """Whether the losses of the same steps are near enough."""
    if seen.keys() != expected.keys() or any(seen[step].keys() != expected[step].keys() for step in seen):
        return Found(wrong=f"losses of steps {sorted(seen)}, and {whose} are of {sorted(expected)}")
    pairs = [(seen[step][name], right) for step in seen for name, right in expected[step].items()]
    gap = _worst(abs(one - other) / max(abs(other), 1e-30) for one, other in pairs)
    measured = {"relative distance": gap}
    if not gap <= most:
        return Found(measured, wrong=f"a loss is {gap:.2g} from {whose}, and {most:g} is allowed")
    return Found(measured, said=f"every loss within {most:g} of {whose}")


def _patches(backend: str) -> Found:
    """What `patches verify` says."""
    code, said, last = _verb(["patches", "verify", *PATCHES, "--json", "--backend", backend], {})
    try:
        told = json.loads(said)
        rows, device = told["results"], told["device"]
    except (ValueError, KeyError):
        return Found(wrong=f"patches verify ended with {code}: {last or said[-300:]}")
    by: dict[str, list[str]] = {}
    for row in rows:
        by.setdefault(row["status"], []).append(row["id"])
    seen = f"on {device} " + "; ".join(f"{status} {', '.join(ids)}" for status, ids in by.items())
    return Found(wrong=seen) if code else Found(said=seen)


def _verb(words: Sequence[str], environ: Mapping[str, str]) -> tuple[int, str, str]:
    """How a verb ended, what it printed, and the last line of its errors."""
    try:
        ended = subprocess.run(
            [sys.executable, "-m", PROGRAM, *words],
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return 124, "", f"no end within {_SECONDS:.0f} s"
    lines = [line.strip() for line in spoken(ended.stderr).splitlines() if line.strip()]
    return ended.returncode, spoken(ended.stdout), " ".join(lines[-3:])[-600:]
