"""One page about a run, or about several side by side: curves, plan, patches, versions."""

from bundle.report.page import render
from bundle.report.run import Run, read

__all__ = ["Run", "read", "render"]
