"""The files that a new patch starts from: an entry of the catalogue and a test, both to be filled in."""

import re
from pathlib import Path

from bundle.errors import UsageError
from bundle.patches.catalogue import PATCHES

_ENTRY = '''"""{title}."""

from bundle.patches.definitions import Evidence
from bundle.patches.entry import Patch, Presence, Replacement

_TARGET = "megatron.core.module:Class.method"


def _defect(source: Evidence) -> Presence:
    found = source[_TARGET]
    if found is None:
        return Presence.UNKNOWN
    return Presence.of("what only the mended code mentions" not in found.names)


PATCHES = (
    Patch(
        id="{patch_id}",
        replacements=(Replacement(_TARGET, "bundle.wrappers.{module}:wrapper"),),
        why="",
        upstream="",
        range="",
        assumes="",
        evidence=(_TARGET,),
        defect=_defect,
    ),
)
'''
_TEST = '''"""{patch_id}: what goes wrong without the patch, and does not with it."""

import pytest


def test_without_the_patch():
    pytest.fail("show the defect on a megatron-core that has it")


def test_with_the_patch():
    pytest.fail("show that the patch mends it")
'''
_STEPS = """\
1. fill in {entry} and give it to bundle/patches/catalogue/__init__.py
2. write bundle/wrappers/{module}.py
3. python -m tools.patches.review RELEASES/* --write
4. python -m tools.patches.page > docs/patches.md
5. make {test} pass"""


def create(patch_id: str, checkout: Path) -> str:
    """Writes both files into a checkout of this project; returns what to do next.

    Raises UsageError for an id that is taken or none, and where a file is there already.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", patch_id):
        raise UsageError(
            f"{patch_id}: an id is words in lower case with dashes between, like mtp-zero-layers"
        )
    if patch_id in {patch.id for patch in PATCHES}:
        raise UsageError(f"{patch_id}: there is a patch of this id")
    module = patch_id.replace("-", "_")
    names = {"patch_id": patch_id, "module": module, "title": patch_id.replace("-", " ").capitalize()}
    entry, test = f"bundle/patches/catalogue/{module}.py", f"tests/upstream/test_{module}.py"
    if not (checkout / "bundle/patches/catalogue").is_dir():
        raise UsageError(f"{checkout} is no checkout of mcore-bundle: go to one")
    taken = [file for file in (entry, test) if (checkout / file).exists()]
    if taken:
        raise UsageError("There are files already where the new ones would be:", taken)
    for file, template in ((entry, _ENTRY), (test, _TEST)):
        (checkout / file).parent.mkdir(parents=True, exist_ok=True)
        (checkout / file).write_text(template.format(**names), "utf-8")
    return _STEPS.format(entry=entry, test=test, **names)
