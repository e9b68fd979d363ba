"""Imports what a rank has imported when its engine is made; see tests.world."""

from bundle import backends
from tests import world

backends.set_up_runtime(world.backend())

import bundle.engine  # noqa: E402
import bundle.models.gpt  # noqa: E402
import bundle.verification.numbers  # noqa: E402, F401
