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
from bundle.environment.doctor import AUTOLOAD_VARIABLE
from bundle.environment.machine import Finding, Hardware, Level, fail, ok, to_json_value, to_printable
from bundle.environment.packages import InstalledPackages
from bundle.preflight import ProbeResult
from bundle.verification import WorkOrder, build_needed_patch_plan, decide_patches, run_orders
from bundle.verification.collective_types import MOVED_TYPES, REDUCED_TYPES

DOCTOR_COMMAND = "mcore-bundle doctor --acceptance"
PROGRAM_MODULE = "bundle"  # what `python -m` runs for a verb
PATCH_IDS_TO_VERIFY: tuple[str, ...] = ()  # that are verified; without any, all that apply
TRAIN_STEPS, CHECKPOINT_STEP = 5, 3  # of training, and until the checkpoint that is gone on from
# The largest relative distance of a loss from the cpu's after five steps; on an H200 it was 5e-7 in fp32.
LOSS_TOLERANCES = {"fp32": 1e-4, "bf16": 1e-2}
RESUME_TOLERANCE = 1e-5  # of an unbroken run's: kernels may add in another order
_TIMEOUT_SECONDS = 3600.0  # that a verb may take


class OperatorCheck(NamedTuple):
    """An operator of the accelerator, and what measures it ("package.module:function")."""

    name: str  # in capabilities: of an attention kernel, or of an operator
    measurement: str


def _build_operator_check(name: str, function: str) -> OperatorCheck:
    return OperatorCheck(name, f"bundle.verification.measurements.operators:measure_{function}")


# By backend. On cuda layers are Transformer Engine's and on the cpu torch's own: losses stand for them.
OPERATORS: Mapping[str, tuple[OperatorCheck, ...]] = {
    "ascend": (
        _build_operator_check("flash", "npu_fusion_attention"),
        _build_operator_check("rms_norm", "npu_rms_norm"),
        _build_operator_check("swiglu", "npu_swiglu"),
        _build_operator_check("rotary", "npu_rotary_mul"),
        _build_operator_check("permute", "ascend_permutation"),
        _build_operator_check("grouped_experts", "npu_grouped_matmul"),
        _build_operator_check("adamw", "fused_adamw"),
    )
}
COLLECTIVE_MEASUREMENT_FUNCTION = (
    "bundle.verification.measurements.collectives:require_exact_collective_results"
)


class AcceptancePart(NamedTuple):
    """A part of the acceptance, and what it came to."""

    name: str
    result: ProbeResult

    def to_finding(self, runs_directory: Path) -> Finding:
        """Return this part as a finding for people; `runs_directory` holds its runs."""
        result = self.result
        measured = ", ".join(f"{value:.2g} {unit}" for unit, value in result.measured.items())
        summary = "; ".join(
            filter(None, (measured, result.note, result.skipped and f"skipped: {result.skipped}"))
        )
        if result.wrong:
            return fail(
                self.name, result.wrong, f"see {runs_directory}, and report it with the output of --json"
            )
        return ok(self.name, summary or result.status)


def run_acceptance(
    hardware: Hardware, findings: Sequence[Finding], directory: Path
) -> Iterator[AcceptancePart]:
    """Yield each part as soon as its result is known; only the environment, where that is unfit.

    `findings` are doctor's; `directory` is empty, for runs.
    """
    environment = _check_environment(findings)
    yield AcceptancePart("environment", environment)
    if environment.wrong:
        return
    backend, ranks = hardware.backend, len(hardware.devices) or 2
    for operator in OPERATORS.get(backend, ()):
        yield AcceptancePart(
            f"operator {operator.name}", _time_run(partial(_measure_operator, operator, backend))
        )
    yield AcceptancePart("collectives", _time_run(partial(check_two_rank_collectives, backend, ranks)))
    training = _DemoRunComparison(backend, directory)
    for dtype, tolerance in LOSS_TOLERANCES.items():
        yield AcceptancePart(
            f"five steps in {dtype}", _time_run(partial(training.compare_with_cpu, dtype, tolerance))
        )
    yield AcceptancePart("checkpoint", _time_run(training.compare_single_rank_resume))
    yield AcceptancePart("two ranks", _time_run(partial(training.compare_tensor_parallel_resume, ranks)))
    yield AcceptancePart("patches", _time_run(partial(_run_patches_verify, backend)))


def build_document(
    hardware: Hardware, installed_packages: InstalledPackages, parts: Sequence[AcceptancePart]
) -> dict[str, Any]:
    """Return the results of the parts as JSON can hold them; `combination` is for docs/compatibility.md.

    `combination` is None where a part failed. The document says so where the device is emulated, and thus not
    real.
    """
    device = hardware.devices[0] if hardware.devices else None
    name = device.name if device else hardware.backend
    passed = not any(part.result.wrong for part in parts)
    proven = [
        f"{part.name}: {part.result.note}" if part.result.note else part.name
        for part in parts
        if part.result.status == "passed"
    ]
    combination = None
    if passed:
        command = f"{DOCTOR_COMMAND} --backend {hardware.backend}"
        combination = compatibility.build_proven_combination(
            installed_packages, hardware.backend, name, proven, command
        )
    return {
        "schema": 1,
        "backend": hardware.backend,
        "device": name,
        "devices": len(hardware.devices),
        "emulated": compatibility.is_emulated(name),
        "driver": to_json_value(hardware.driver),
        "toolkit": to_json_value(hardware.toolkit),
        "passed": passed,
        "parts": [
            {
                "name": part.name,
                "status": part.result.status,
                "seconds": part.result.seconds,
                "measured": dict(part.result.measured),
                "cause": part.result.wrong or part.result.skipped or part.result.note,
            }
            for part in parts
        ],
        "combination": combination.model_dump(mode="json") if combination else None,
    }


def _time_run(run: Callable[[], ProbeResult]) -> ProbeResult:
    began = time.monotonic()
    return replace(run(), seconds=round(time.monotonic() - began, 1))


def _check_environment(findings: Iterable[Finding]) -> ProbeResult:
    wrong = [f"{finding.subject}: {finding.cause}" for finding in findings if finding.level is Level.FAIL]
    return ProbeResult(wrong="; ".join(wrong))


def _measure_operator(operator: OperatorCheck, backend: str) -> ProbeResult:
    distance = _measure_order(WorkOrder(0, operator.measurement, 1, 300, ()), backend)
    if isinstance(distance, str):
        return ProbeResult(wrong=distance)
    measured = {"of the tolerance": distance}
    complaint = f"values or gradients differ from the reference by {distance:.3g} times the tolerance"
    return ProbeResult(measured, wrong="" if distance <= 1 else complaint)


def check_two_rank_collectives(backend: str, ranks: int) -> ProbeResult:
    if ranks < 2:
        return ProbeResult(skipped="needs two devices")
    name = capabilities.find_capabilities(backend).collectives
    distance = _measure_order(WorkOrder(0, COLLECTIVE_MEASUREMENT_FUNCTION, 2, 600, ()), backend)
    note = f"{name} adds up {', '.join(REDUCED_TYPES)} and moves {', '.join(MOVED_TYPES)}"
    return ProbeResult(wrong=distance) if isinstance(distance, str) else ProbeResult(note=note)


def _measure_order(order: WorkOrder, backend: str) -> float | str:
    """Return the largest gap that the ranks measured, or a description of what went wrong."""
    patch_survey = decide_patches(backend)
    ((_, answers),) = run_orders(
        [order], build_needed_patch_plan(patch_survey), backend=backend, root=patch_survey.core.root
    )
    gaps = [observation.gap for observation in answers if observation.gap is not None]
    if len(gaps) < len(answers) or not gaps:
        return " | ".join(
            dict.fromkeys(str(observation) for observation in answers if observation.gap is None)
        )
    return _find_worst(gaps)


def _find_worst(gaps: Iterable[float]) -> float:
    """Return the largest gap; NaN counts as the largest."""
    return max(gaps, key=lambda gap: (gap != gap, gap), default=math.nan)


_CPU, _DEVICE = "reference", "device"  # runs: of the cpu, and of one device
Losses = Mapping[int, Mapping[str, float]]  # step -> name -> value


class _DemoRunComparison:
    """The demo (latent attention, experts, multi-token prediction), a few steps in several places."""

    def __init__(self, backend: str, directory: Path) -> None:
        self.backend, self.directory = backend, directory

    def compare_with_cpu(self, dtype: str, tolerance: float) -> ProbeResult:
        """Compare the losses of one device with those of the cpu."""
        wrong = self._find_training_error(_CPU, dtype, "cpu") or self._find_training_error(
            _DEVICE, dtype, self.backend
        )
        if wrong:
            return ProbeResult(wrong=wrong)
        return judge_losses(
            self._read_losses(_DEVICE, dtype), self._read_losses(_CPU, dtype), tolerance, "the cpu's"
        )

    def compare_single_rank_resume(self) -> ProbeResult:
        """Compare the last steps from a checkpoint with those of the run that wrote it."""
        return self._resume_and_compare_losses("resumed", ranks=1, tolerance=RESUME_TOLERANCE)

    def compare_tensor_parallel_resume(self, ranks: int) -> ProbeResult:
        """Compare the last steps on two devices (tensor and sequence parallel) with the unbroken run."""
        if ranks < 2:
            return ProbeResult(skipped="needs two devices")
        return self._resume_and_compare_losses(
            "split", ranks=2, tolerance=LOSS_TOLERANCES["fp32"], extra_settings=("parallel.tp=2",)
        )

    def _resume_and_compare_losses(
        self, name: str, *, ranks: int, tolerance: float, extra_settings: Sequence[str] = ()
    ) -> ProbeResult:
        folder = self._get_run_directory(_DEVICE, "fp32") / "checkpoints"
        saved = sorted(folder.glob("step-*"))
        if not saved:
            return ProbeResult(wrong="the fp32 run wrote no checkpoint")
        wrong = self._find_training_error(
            name, "fp32", self.backend, ranks=ranks, origin=saved[0], extra_settings=extra_settings
        )
        if wrong:
            return ProbeResult(wrong=wrong)
        unbroken = self._read_losses(_DEVICE, "fp32")
        last = {step: unbroken[step] for step in unbroken if step > CHECKPOINT_STEP}
        return judge_losses(self._read_losses(name, "fp32"), last, tolerance, "the unbroken run's")

    def _get_run_directory(self, name: str, dtype: str) -> Path:
        return self.directory / f"{name}-{dtype}"

    def _read_losses(self, name: str, dtype: str) -> Losses:
        return parse_losses((self._get_run_directory(name, dtype) / "metrics.jsonl").read_text("utf-8"))

    def _find_training_error(
        self,
        name: str,
        dtype: str,
        backend: str,
        *,
        ranks: int = 1,
        origin: Path | None = None,
        extra_settings: Sequence[str] = (),
    ) -> str:
        """Train; return what went wrong, or an empty string."""
        settings = (
            f"model.dtype={dtype}", "model.config.num_hidden_layers=2", f"train.steps={TRAIN_STEPS}",
            "train.micro_batch_size=2", "train.global_batch_size=4", "train.eval_interval=0",
            "train.eval_batches=1", "train.log_interval=1", "optimizer.warmup_steps=0", "parallel.ep=1",
            f"checkpoint.interval={CHECKPOINT_STEP}", *extra_settings,
        )  # fmt: skip
        arguments = ["--backend", backend, "--devices-per-node", str(ranks)]
        arguments += ["--run-directory", str(self._get_run_directory(name, dtype))]
        arguments += [] if origin is None else ["--from", str(origin)]
        arguments += [word for setting in settings for word in ("--set", setting)]
        # The cpu has no use for the library of another device, which torch would load; and fp32 is no TF32.
        environ = {"NVIDIA_TF32_OVERRIDE": "0"} | ({AUTOLOAD_VARIABLE: "0"} if backend == "cpu" else {})
        code, output, error_text = _run_verb(["train", "demo", *arguments], environ)
        return "" if code == 0 else f"training on {backend}: exit code {code}: {error_text or output}"


def parse_losses(metrics: str) -> Losses:
    """Return the losses in the lines of a run's metrics; a step that was validated has two lines."""
    losses_by_step: dict[int, dict[str, float]] = {}
    for line in metrics.splitlines():
        row = json.loads(line)
        losses_by_step.setdefault(row["step"], {}).update(
            {k: v for k, v in row.items() if k.endswith("loss")}
        )
    return losses_by_step


def judge_losses(actual: Losses, expected: Losses, tolerance: float, reference_name: str) -> ProbeResult:
    """Compare the losses of the same steps, within a relative tolerance."""
    if actual.keys() != expected.keys() or any(
        actual[step].keys() != expected[step].keys() for step in actual
    ):
        return ProbeResult(
            wrong=f"losses are of steps {sorted(actual)}, but {reference_name} of {sorted(expected)}"
        )
    pairs = [(actual[step][name], right) for step in actual for name, right in expected[step].items()]
    gap = _find_worst(abs(one - other) / max(abs(other), 1e-30) for one, other in pairs)
    measured = {"relative distance": gap}
    if not gap <= tolerance:
        return ProbeResult(
            measured, wrong=f"a loss differs from {reference_name} by {gap:.2g}; {tolerance:g} is allowed"
        )
    return ProbeResult(measured, note=f"every loss within {tolerance:g} of {reference_name}")


def _run_patches_verify(backend: str) -> ProbeResult:
    """Return the result of `patches verify`."""
    code, output, error_text = _run_verb(
        ["patches", "verify", *PATCH_IDS_TO_VERIFY, "--json", "--backend", backend], {}
    )
    try:
        document = json.loads(output)
        rows, device = document["results"], document["device"]
    except (ValueError, KeyError):
        return ProbeResult(wrong=f"patches verify ended with exit code {code}: {error_text or output[-300:]}")
    ids_by_status: dict[str, list[str]] = {}
    for row in rows:
        ids_by_status.setdefault(row["status"], []).append(row["id"])
    summary = f"on {device} " + "; ".join(
        f"{status} {', '.join(ids)}" for status, ids in ids_by_status.items()
    )
    return ProbeResult(wrong=summary) if code else ProbeResult(note=summary)


def _run_verb(arguments: Sequence[str], environ: Mapping[str, str]) -> tuple[int, str, str]:
    """Run a verb; return its exit code, its output, and the last lines of its errors."""
    try:
        completed = subprocess.run(
            [sys.executable, "-m", PROGRAM_MODULE, *arguments],
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return 124, "", f"the command did not end within {_TIMEOUT_SECONDS:.0f} s"
    lines = [line.strip() for line in to_printable(completed.stderr).splitlines() if line.strip()]
    return completed.returncode, to_printable(completed.stdout), " ".join(lines[-3:])[-600:]
