"""The driver's request for a reset of a GPU or a restart of its node: `python -m bundle.preflight.recovery`.

The health check of nvidia-resiliency-ext (github.com/NVIDIA/nvidia-resiliency-ext) finds it, where installed.
"""

import logging

from bundle.preflight import ProbeResult


class _WarningCollector(logging.Handler):
    """Collects warnings while it is a handler, as the health check reports defects only in warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def probe() -> ProbeResult:
    """Run the health check for all GPUs of the node."""
    try:
        from nvidia_resiliency_ext.shared_utils.health_check import GPUHealthCheck
    except ImportError as error:
        return ProbeResult(skipped=f"nvidia-resiliency-ext cannot be used: {error}")
    warnings = _WarningCollector()
    logging.getLogger().addHandler(warnings)
    try:
        check = GPUHealthCheck()
        healthy = check()
    finally:
        logging.getLogger().removeHandler(warnings)
    warning_text = "; ".join(warnings.lines)
    if not check.enabled:
        return ProbeResult(
            skipped=warning_text or "the GPU health check of nvidia-resiliency-ext is disabled on this node"
        )
    return (
        ProbeResult()
        if healthy
        else ProbeResult(
            wrong=warning_text
            or "the GPU health check of nvidia-resiliency-ext reports a fault, but logs no reason"
        )
    )


if __name__ == "__main__":
    probe().print_result()
