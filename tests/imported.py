"""Imports what a rank on the cpu has imported when its engine is made; see tests.world."""

from bundle import backends

backends.prepare("cpu")

import bundle.engine  # noqa: E402
import bundle.models.gpt  # noqa: E402
import bundle.verification.numbers  # noqa: E402, F401
