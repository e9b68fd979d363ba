"""A run through MindSpeed that goes on from its checkpoint, after one that did not have to.

python -m tests.npu.continuing FOLDER   (a rank; prints the losses of both as JSON)
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from bundle import backends
from bundle.patches import patcher
from bundle.recipe import from_mapping
from tests import world
from tests.checkpoints.stretches import Stretch, train
from tests.matrix.rank import patches


class Through(Stretch):
    """A stretch whose layers are MindSpeed's."""

    def case(self) -> Any:
        document = super().case().recipe().dump() | {"backend_options": {"mindspeed": True}}
        return SimpleNamespace(recipe=lambda: from_mapping(document))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    bf16: dict[str, Any] = {"parallel": {}, "arithmetic": {"dtype": "bf16"}}
    whole = Through(steps=3, save="kept", **bf16)
    patcher.apply(patches([whole.case()]))
    runtime = backends.prepare(world.backend(), whole.case().recipe())
    world.join()
    losses = [
        train(stretch, runtime, folder)["losses"]
        for stretch in (whole, Through(steps=1, load="kept", **bf16))
    ]
    print(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
