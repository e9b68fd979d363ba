"""The files that a new patch starts from, and the way from them to a green test."""

import re
from pathlib import Path

from bundle.errors import UsageError
from bundle.patches.catalogue import PATCHES
from bundle.patches.subject import DEFAULT

_ENTRY = '''"""{title}."""

from bundle.patches.definitions import Definition
from bundle.patches.entry import NOTHING, Patch, Presence, called, reads

_TARGET = "megatron.core.module:Class.method"  # what the wrapper replaces


@reads(_TARGET)  # and all else that the answer is read in
def _defect(method: Definition) -> Presence:
    """Whether ... (the question that the source answers)."""
    # The wrong code as in the releases that have it, `_` is any expression; where neither is, nobody knows.
    return Presence.told(method.has("the_wrong_code(_, 1)"), absent=method.has("the_mended_code(_, 2)"))


PATCHES = (
    Patch(
        id="{patch_id}",
        replacements=(called(_TARGET, "{module}:mended"),),
        why="What a user sees, and what causes it.",
        silent=True,  # whether nothing tells of it: False where it ends in an error, or only costs time
        upstream="where upstream knows of it, or how it was found",
        range="",  # the releases that have it, like ">=0.16,<0.18"
        when=frozenset(),  # features of a recipe that meets it: Recipe.features
        assumes=NOTHING,  # of the caller
        defect=_defect,
    ),
)
'''
_WRAPPER = '''"""{title}."""

from typing import Any

from bundle.wrappers import Function, around


@around
def mended(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the target with the defect mended around it; nothing of its body is copied."""
    return original(self, *args, **kwargs)  # change what goes in, or what comes out
'''
_MEASUREMENT = '''"""{title}: a run against one that does not meet the defect."""

from bundle.verification.numbers import DENSE, Bench, Numbers, gap


def distance(bench: Bench) -> float:
    """How far loss and gradients are from those of a run that does not need the patch."""
    return gap(_run(bench, meets=True), _run(bench, meets=False))


def _run(bench: Bench, *, meets: bool) -> Numbers:
    with bench.layout() as layout:  # layout(tp=2) shares the model out
        model = layout.chunk(DENSE)  # make this one meet the defect, or not
        return layout.trained(model, [layout.two_rows()])
'''
_TEST = '''"""{patch_id}: what goes wrong without the patch does not with it."""

import pytest

from bundle.verification import Status, verify
from tests.patches.trees import Release


@pytest.mark.world
def test_it_is_proven(release: Release):
    (result,) = verify("cpu", ["{patch_id}"], tree=release("{having}"))
    assert result.status is Status.PROVEN, result.reason
'''
_STEPS = """\
Written: {files}
{having} stands for a release that has the defect: name yours wherever it is named, in {test} too.

1. Evidence: in {entry}
   name the target, and have _defect tell the wrong code from the mended one. In
   bundle/patches/catalogue/__init__.py import {module} and put *{module}.PATCHES into PATCHES.
2. Review: have the reviewed list read every release that is in it, and say yourself where the defect is:
     python -m tests.matrix.fetch .cache/reviewed reviewed
     python -m tools.patches.review --write .cache/reviewed/*
     tests/patches/test_releases.py, PRESENT:  "{patch_id}": [("0.12.0", "0.19.2")],
     tests/history/truth.py, PRESENT:  "{patch_id}": _has("module", r"the wrong code"),
   and the same releases in `range` of the entry: "" is all of them.
   Look: mcore-bundle patches plan --mcore .cache/reviewed/{having} says APPLY, or SKIP where it is mended.
3. Check: in {measurement}
   show the defect as a distance or an error, and put into bundle/verification/check.py, in CHECKS:
     "{patch_id}": measured("{module}:distance", Gap(1e-2)),
     or Raises("TypeError", "part of the message") for the gap; and world=2 for two ranks.
   Look: PYTHONPATH=.cache/reviewed/{having} mcore-bundle patches verify {patch_id} --backend cpu
   fails for the gap that the patch leaves.
4. Replacement: in {wrapper} mend it around the original.
   Look: the same command says "proven".
5. Page: python -m tools.patches.page > docs/patches.md
6. Green: ruff format . && make lint
     BUNDLE_RELEASES=.cache/reviewed python -m pytest {test} tests/patches tests/tools tests/verification
   docs/patches.md, "Sending one", says what goes with them.
"""


def create(patch_id: str, checkout: Path) -> str:
    """Writes the files into a checkout of this project; returns what to do next.

    Raises UsageError for an id that is taken or none, and where a file is there already.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", patch_id):
        raise UsageError(
            f"{patch_id}: an id is words in lower case with dashes between, like mtp-zero-layers"
        )
    if patch_id in {patch.id for patch in PATCHES}:
        raise UsageError(f"{patch_id}: there is a patch of this id")
    if not (checkout / "bundle/patches/catalogue").is_dir():
        raise UsageError(f"{checkout} is no checkout of mcore-bundle: go to one")
    module = patch_id.replace("-", "_")
    title = patch_id.replace("-", " ").capitalize()
    names = {"patch_id": patch_id, "module": module, "title": title, "having": DEFAULT}
    files = {
        "entry": (f"bundle/patches/catalogue/{module}.py", _ENTRY),
        "wrapper": (f"bundle/wrappers/{module}.py", _WRAPPER),
        "measurement": (f"bundle/verification/measurements/{module}.py", _MEASUREMENT),
        "test": (f"tests/upstream/test_{module}.py", _TEST),
    }
    taken = [file for file, _ in files.values() if (checkout / file).exists()]
    if taken:
        raise UsageError("There are files already where the new ones would be:", taken)
    for file, template in files.values():
        (checkout / file).parent.mkdir(parents=True, exist_ok=True)
        (checkout / file).write_text(template.format(**names), "utf-8")
    paths = {name: file for name, (file, _) in files.items()}
    return _STEPS.format(files=", ".join(paths.values()), **paths, **names)
