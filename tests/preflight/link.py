"""The probe of links, on a node that never sends (PLACE held), or that tells late what came of it (slow),
or that takes a second to set up its first connection (late)."""

import os
import sys
import time
from typing import Any

import torch.distributed as dist

from bundle.preflight import links
from bundle.preflight.nodes import LinkWorker


def _late(of: Any, name: str) -> None:
    """The first call of a function comes back a second later."""
    function, late = getattr(of, name), [1]

    def called(*given: Any) -> Any:
        found = function(*given)
        time.sleep(late.pop() if late else 0)
        return found

    setattr(of, name, called)


if __name__ == "__main__":
    if sys.argv[2] == "held":
        dist.batch_isend_irecv = lambda _: time.sleep(600)  # type: ignore
    if sys.argv[2] == "slow":
        result = links.LinkStore.collect_node_names_and_defects

        def slow(*of: Any) -> Any:
            found = result(*of)
            time.sleep(3)  # the others end meanwhile
            return found

        links.LinkStore.collect_node_names_and_defects = slow  # type: ignore
    if sys.argv[2] == "late":
        _late(dist, "batch_isend_irecv")
        _late(links.LinkMeasurer, "_wait_for_device")
    links.probe(LinkWorker.from_argument(sys.argv[1])).print_result()
    sys.stdout.flush()
    os._exit(0)
