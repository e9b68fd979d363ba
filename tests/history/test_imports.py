"""The import paths of frameworks with the patches enabled, to their end: `make foreign TREE=FOLDER`.

Every module of a framework that imports megatron is imported. What is compiled for CUDA has stand-ins
(tests/history/importing.py); what no stand-in will do for ends a path, and is told by name.
"""

import os
import re
from pathlib import Path

import pytest

from bundle.patches.catalogue import PATCHES
from bundle.patches.entry import NO_CALLER_ASSUMPTION
from tests.history.test_foreign import FRAMEWORKS, repository, unpacked
from tests.patches.test_external_program import patched
from tests.patches.trees import Release

pytestmark = pytest.mark.releases
IMPORTING = Path(__file__).with_name("importing.py")
SWIFT, BRIDGE = "ms-swift", "mcore-bridge"
CLONES = {name: FRAMEWORKS[name][:2] for name in ("verl", BRIDGE)}
CLONES[SWIFT] = ("modelscope/ms-swift", ("swift",))
# framework -> what else is on the path, what its paths stop at, and the patches of one of megatron's modules
# that it has code of its own beside: what such a patch assumes of its caller says so
PATHS: dict[str, tuple[tuple[str, ...], set[str], set[str]]] = {
    "verl": ((), {"megatron.bridge"}, {"mrope-packed"}),
    BRIDGE: ((), set(), set()),
    SWIFT: ((BRIDGE,), set(), set()),
}
_IMPORTS = re.compile(r"^\s*(from|import)\s+(megatron|mbridge|mcore_bridge)\b", re.MULTILINE)


def unpacked_on_path(framework: str, tmp_path: Path) -> Path:
    """A framework's code, as a directory of the search path."""
    name, folders = CLONES[framework]
    top = unpacked(repository(name), "HEAD", tmp_path / framework, *folders)
    return top / "src" if "src" in folders else top


def modules(path: Path) -> list[str]:
    """The modules below a directory of the search path that import megatron, or what is made for it."""
    files = [file for file in sorted(path.rglob("*.py")) if _IMPORTS.search(file.read_text())]
    names = [".".join(file.relative_to(path).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names]


@pytest.mark.parametrize("framework", PATHS)
def test_patches_land_once_and_before_the_framework_holds_what_they_replace(
    framework: str, release: Release, tmp_path: Path
):
    beside, stops, own = PATHS[framework]
    path, *others = (unpacked_on_path(name, tmp_path) for name in (framework, *beside))
    search = [path, *others, release("0.16.1"), os.environ.get("PYTHONPATH", "")]
    vouching = [
        word for patch in PATCHES if patch.assumes != NO_CALLER_ASSUMPTION for word in ("--vouch", patch.id)
    ]
    importing = modules(path)
    ran = patched(*vouching, IMPORTING, *importing, PYTHONPATH=os.pathsep.join(map(str, search)))
    said: dict[str, list[list[str]]] = {}
    for line in ran.stdout.splitlines():
        word, *rest = line.split()
        said.setdefault(word, []).append(rest)
    assert {what for what, *_ in said.get("stopped", ())} == stops, said.get("stopped")
    assert len(said["imported"]) > 2 * len(said.get("stopped", ())), said["imported"]
    assert {patch for patch, _ in said.get("elsewhere", ())} == own, said.get("elsewhere")
    landed = {patch for patch, _ in said["patched"]}
    listed = set(re.findall(r"^  APPLY ([\w-]+): ", ran.stderr, re.MULTILINE))
    assert len(landed) > 20 and landed <= listed, landed ^ listed
