"""A process of a job through MindSpeed, looked at; prints what was found as JSON.

python -m tests.npu.adapting
"""

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bundle import backends
from bundle.backends.ascend.mindspeed import is_replaced_by_mindspeed
from bundle.errors import BundleError
from bundle.patches import patcher
from bundle.patches.catalogue import PATCHES
from bundle.recipe import from_mapping
from tests.npu.training import CASES
from tests.ranks import plan_patches


def main() -> None:
    dense, latent = (replace(case, mindspeed=True) for case in CASES if case.name in ("dense", "latent bf16"))
    patcher.apply(plan_patches([dense, latent]))
    log = logging.NullHandler()
    logging.getLogger().addHandler(log)
    before = list(sys.argv), list(logging.getLogger().handlers)
    runtime = backends.set_up_runtime("ascend", latent.recipe())
    targets = {
        replacement.target
        for patch in PATCHES
        if "ascend" in patch.backends
        for replacement in patch.replacements
    }
    document = latent.recipe().dump()
    document["model"]["fp8"] = {"scaling": "tensorwise"}
    fp8 = from_mapping(document)
    seen = {
        "owned": sorted(filter(is_replaced_by_mindspeed, targets)),
        "unchanged": before == (list(sys.argv), list(logging.getLogger().handlers)),
        "fp8": refusal(lambda: runtime.build_config_options(fp8)),
        "another job": refusal(lambda: backends.set_up_runtime("ascend", fp8)),
        "without": refusal(lambda: backends.set_up_runtime("ascend")),
    }
    print(json.dumps(seen))


def refusal(call: Callable[[], Any]) -> str:
    """What a call is refused with."""
    try:
        call()
    except BundleError as error:
        return str(error)
    return "taken"


if __name__ == "__main__":
    main()
