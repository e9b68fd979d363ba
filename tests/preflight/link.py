"""The probe of links, on a node that never sends where its word says so: PLACE held."""

import os
import sys
import time

from bundle.preflight import links
from bundle.preflight.nodes import Place

if __name__ == "__main__":
    if sys.argv[2] == "held":
        links.dist.batch_isend_irecv = lambda _: time.sleep(600)  # type: ignore[attr-defined]
    links.probe(Place.parse(sys.argv[1])).tell()
    sys.stdout.flush()
    os._exit(0)
