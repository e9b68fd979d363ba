"""The import paths of frameworks, as far as they go on this machine, with the patches enabled.

`make foreign TREE=FOLDER`, with clones of them. What they import and this environment does not have ends a
path; it is told by name.
"""

import os
from pathlib import Path

import pytest

from bundle.patches.catalogue import PATCHES
from bundle.patches.entry import NOTHING
from tests.history.test_foreign import repository, unpacked
from tests.patches.test_enabling import patched
from tests.patches.trees import Release

pytestmark = pytest.mark.releases
IMPORTING = Path(__file__).with_name("importing.py")
# framework -> its repository, what of it is put on the path, and what it trains with megatron-core by
PATHS = {
    "verl": (
        "volcengine/verl",
        ("verl",),
        ("verl", "verl.models.mcore", "verl.models.mcore.mtp_patch", "verl.workers.engine.megatron"),
    ),
    "ms-swift": ("modelscope/ms-swift", ("swift",), ("swift", "swift.megatron", "swift.megatron.model")),
    "mcore-bridge": (
        "modelscope/mcore-bridge",
        ("src",),
        ("mcore_bridge", "mcore_bridge.model", "mcore_bridge.patcher"),
    ),
}


@pytest.mark.parametrize("framework", PATHS)
def test_patches_land_once_and_before_the_framework_holds_what_they_replace(
    framework: str, release: Release, tmp_path: Path
):
    name, folders, modules = PATHS[framework]
    top = unpacked(repository(name), "HEAD", tmp_path, *folders)
    path = [top / "src" if "src" in folders else top, release("0.16.1"), os.environ.get("PYTHONPATH", "")]
    vouching = [word for patch in PATCHES if patch.assumes != NOTHING for word in ("--vouch", patch.id)]
    ran = patched(
        "--backend", "cpu", *vouching, IMPORTING, *modules, PYTHONPATH=os.pathsep.join(map(str, path))
    )
    lines = ran.stdout.splitlines()
    stopped = [line for line in lines if line.startswith("stopped ")]
    (landed,) = [line.split()[1:] for line in lines if line.startswith("patched")]
    if len(stopped) == len(modules):
        pytest.skip(f"{framework}: {'; '.join(stopped)}")
    assert framework == "ms-swift" or landed, ran.stdout  # its modules are lazy
