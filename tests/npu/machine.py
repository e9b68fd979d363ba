"""The command mcore-bundle on a machine that has emulated NPUs: python -m tests.npu.machine VERB...

What the verbs look at is a recorded Atlas A2 whose devices are called emulated; ranks that it starts are
those of `python -m bundle`, in this environment (tests.npu.child.emulated), and verbs this command again. Of
the patches an acceptance verifies one here: each is two processes for every rank.
"""

import os
import re
from collections.abc import Sequence
from unittest.mock import patch

from bundle import acceptance
from bundle.cli import main
from bundle.environment import hardware, machine
from bundle.environment.machine import DetectedValue, Machine
from tests.environment.machines import recorded


def local() -> Machine:
    """The recorded machine, with the variables of this process."""
    of = recorded("a2-24.1", os.environ)

    def run(command: Sequence[str]) -> DetectedValue[str]:
        said = of.run(command)
        named = re.sub(r"\b910B\w+", r"\g<0> (emulated)", said.value or "")
        return DetectedValue(named or None, said.reason)

    return Machine(of.root, of.environ, run)


if __name__ == "__main__":
    with (
        patch.object(machine, "build_local_machine", local),
        patch.object(hardware, "build_local_machine", local),
        patch.object(acceptance, "PROGRAM_MODULE", "tests.npu.machine"),
        patch.object(acceptance, "PATCH_IDS_TO_VERIFY", ("mla-without-te-linear",)),
    ):
        main()
