"""Which of the replacements that `patches list` names for ascend stand where its world's backend is prepared.

python -m tests.npu.seams prints them as JSON.
"""

import functools
import json
import sys

from bundle import backends
from bundle.backends import compiling
from bundle.capabilities.ascend import REPLACEMENT_REASON_BY_TORCH_NAME
from tests import world


def stands(target: str) -> bool:
    """Whether what has this name now is ours, or says that Transformer Engine is there, which it is not."""
    module, _, attribute = target.partition(":")
    if attribute == "HAVE_TE":
        return bool(sys.modules[module].HAVE_TE)
    try:
        found = functools.reduce(getattr, attribute.split("."), sys.modules[module])
    except AttributeError:  # Transformer Engine's, without it
        return False
    place = getattr(getattr(found, "__code__", None), "co_filename", "")
    if place == compiling.__file__:  # what megatron has made with torch.compile is no replacement of its own
        return target == "torch:compile"
    return "/bundle/backends/" in place


def main() -> None:
    backends.set_up_runtime(world.backend())
    import bundle.engine  # noqa: F401  what it imports is there

    print(json.dumps([target for target in REPLACEMENT_REASON_BY_TORCH_NAME if stands(target)]))


if __name__ == "__main__":
    main()
