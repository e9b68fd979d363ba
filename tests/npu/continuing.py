"""A run through MindSpeed that goes on from its checkpoint, after one that did not have to.

python -m tests.npu.continuing FOLDER   (a rank; prints the losses of both as JSON)
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bundle.recipe import from_mapping
from tests.checkpoints.stretches import Stretch, train
from tests.ranks import finish_rank, plan_patches, start_rank


class Through(Stretch):
    """A stretch whose layers are MindSpeed's."""

    def case(self) -> Any:
        document = super().case().recipe().dump() | {"backend_options": {"mindspeed": True}}
        return SimpleNamespace(recipe=lambda: from_mapping(document))


def main(folder: Path) -> None:
    bf16: dict[str, Any] = {"parallel": {}, "arithmetic": {"dtype": "bf16"}}
    whole = Through(steps=3, save="kept", **bf16)
    runtime, _ = start_rank(plan_patches([whole.case()]), whole.case().recipe())
    losses = [
        train(stretch, runtime, folder)["losses"]
        for stretch in (whole, Through(steps=1, load="kept", **bf16))
    ]
    finish_rank(losses)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
