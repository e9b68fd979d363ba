"""The probe of links, on a node that never sends (PLACE held), or that tells late what came of it (slow),
or that takes a second to set up its first connection (late)."""

import os
import sys
import time
from typing import Any

from bundle.preflight import links
from bundle.preflight.nodes import Place

if __name__ == "__main__":
    if sys.argv[2] == "held":
        links.dist.batch_isend_irecv = lambda _: time.sleep(600)  # type: ignore[attr-defined]
    if sys.argv[2] == "slow":
        result = links.Meeting.result

        def slow(*of: Any) -> Any:
            found = result(*of)
            time.sleep(3)  # the others end meanwhile
            return found

        links.Meeting.result = slow  # type: ignore
    if sys.argv[2] == "late":
        wait = links.Measuring._wait
        waited: list[Any] = []

        def late(of: Any) -> None:
            wait(of)
            if not waited:
                time.sleep(1)
            waited.append(of)

        links.Measuring._wait = late  # type: ignore
    links.probe(Place.parse(sys.argv[1])).tell()
    sys.stdout.flush()
    os._exit(0)
