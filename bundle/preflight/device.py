"""The results and speed of a device: `python -m bundle.preflight.device TYPE INDEX quick`."""

import sys
import time

import torch

from bundle.preflight import ProbeResult

# Sizes of the matrices: large enough to keep a device busy, and small enough for a cpu.
_MATRIX_SIZES = {"cpu": 1024}
_DEFAULT_MATRIX_SIZE = 8192
_INNER_SIZE = (
    1024  # products of whole numbers this long are exact, whatever the order in which they are added
)
_SECONDS_BY_PROBE_MODE = {"quick": 2.0, "long": 60.0}
_LEAST_FREE_SHARE = 0.9


def probe(kind: str, index: int, seconds: float) -> ProbeResult:
    """Multiply matrices of whole numbers, whose product is the same on every device."""
    if kind == "npu":
        import torch_npu  # noqa: F401  registers the device
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, index)
    size, measured = _MATRIX_SIZES.get(kind, _DEFAULT_MATRIX_SIZE), {}
    if kind != "cpu":
        free, total = getattr(torch, kind).mem_get_info(device)
        measured["GiB free"] = free / 2**30
        if free < _LEAST_FREE_SHARE * total:
            taken = (total - free) / 2**30
            return ProbeResult(measured, f"another process uses {taken:.1f} GiB of its memory")
    generator = torch.Generator().manual_seed(1)
    left, right = (
        torch.randint(-1, 2, shape, generator=generator).to(torch.float32)
        for shape in ((size, _INNER_SIZE), (_INNER_SIZE, size))
    )
    # Only these rows are compared, as all of them would take a processor too long.
    expected = (left[:64] @ right).to(torch.bfloat16)
    left, right = left.to(device, torch.bfloat16), right.to(device, torch.bfloat16)
    runs, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds or runs < 2:
        product = left @ right
        # This also waits for the device.
        if not torch.equal(product[:64].cpu(), expected):
            return ProbeResult(measured, f"the device computes matrix product {runs + 1} of the test wrong")
        runs += 1
        if runs == 1:  # the first run loads libraries and kernels
            began = time.perf_counter()
    return ProbeResult(
        {**measured, "TFLOP/s": 2e-12 * size * size * _INNER_SIZE * (runs - 1) / max(elapsed, 1e-9)}
    )


if __name__ == "__main__":
    probe(sys.argv[1], int(sys.argv[2]), _SECONDS_BY_PROBE_MODE[sys.argv[3]]).print_result()
