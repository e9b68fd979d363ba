"""Proves each patch on this machine: what goes wrong without it, and that it does not with it."""

from bundle.verification.check import CHECKS, Check, Gap, Observation, Raises, Result, Status
from bundle.verification.verifying import verify

__all__ = ["CHECKS", "Check", "Gap", "Observation", "Raises", "Result", "Status", "verify"]
