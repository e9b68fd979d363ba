"""`patches new`, by somebody who does what it prints, against a defect that is put into a release."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ID, MODULE = "embedding-of-several-rows", "embedding_of_several_rows"
FILE = "megatron/core/models/common/embeddings/language_model_embedding.py"
RIGHT = "            embeddings = word_embeddings\n"
WRONG = "            embeddings = word_embeddings * (1.25 if input_ids.shape[0] > 1 else 1.0)\n"
TARGET = "megatron.core.models.common.embeddings.language_model_embedding:LanguageModelEmbedding.forward"
ENTRY = {
    '"megatron.core.module:Class.method"  # what the wrapper replaces': f'"{TARGET}"',
    '"the_wrong_code(_, 1)"': '"embeddings = word_embeddings * _"',
    '"the_mended_code(_, 2)"': '"embeddings = word_embeddings"',
    'range=""': 'range=">=0.16.1,<0.17"',
}
MEASUREMENT = {
    "DENSE_HF_CONFIG, Bench, Numbers, measure_gap": (
        "DENSE_HF_CONFIG, Bench, Numbers, draw_sequences_with_next_token, measure_gap"
    ),
    "        return layout.run_backward(model, [layout.build_two_rows()])\n": """\
        several = draw_sequences_with_next_token([32, 32])
        together = layout.build_batch(torch.stack(several), torch.ones(2, 32))
        return layout.run_backward(model, [together] if meets else layout.build_single_batches(several))
""",
    "from bundle.verification.numbers": "import torch\n\nfrom bundle.verification.numbers",
}
WRAPPER = {
    "    return original(self, *args, **kwargs)  # change what goes in, or what comes out\n": """\
    pairs = zip(kwargs.pop("input_ids").split(1), kwargs.pop("position_ids").split(1), strict=True)
    each = [original(self, *args, input_ids=ids, position_ids=at, **kwargs) for ids, at in pairs]
    return torch.cat(each, dim=1)
""",
    "from typing import Any\n": "from typing import Any\n\nimport torch\n",
}


class Stranger:
    """A checkout of their own, and a shell in it."""

    def __init__(self, home: Path, trees: dict[str, Path]) -> None:
        self.home, programs = home / "checkout", home / "programs"
        for name in ("bundle", "tests", "tools", "docs", "launch"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, self.home / name, symlinks=True, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", self.home)
        programs.mkdir()
        (programs / "mcore-bundle").write_text(f'#!/bin/sh\nexec {sys.executable} -m bundle "$@"\n')
        (programs / "mcore-bundle").chmod(0o755)
        self.path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        for version, tree in trees.items():
            shutil.copytree(tree, self.home / ".cache/reviewed" / version)
        self.edit(f".cache/reviewed/0.16.1/{FILE}", {RIGHT: WRONG})

    def ran(self, command: str, code: int = 0) -> str:
        """What a command printed, which must end with `code`."""
        variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "BUNDLE_RELEASES")}
        ran = subprocess.run(
            ["sh", "-c", command],
            cwd=self.home,
            env={**variables, "PATH": self.path},
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert ran.returncode == code, f"{command}\n{ran.stdout}{ran.stderr}"
        return ran.stdout

    def edit(self, file: str, changes: dict[str, str]) -> None:
        """Writes a file of theirs anew with these changes."""
        text = (self.home / file).read_text()
        for before, after in changes.items():
            assert text.count(before) == 1, (file, before)
            text = text.replace(before, after)
        (self.home / file).unlink()  # it may be a link to what others use
        (self.home / file).write_text(text)


@pytest.mark.releases
@pytest.mark.world
def test_what_is_printed_leads_from_a_defect_to_a_green_test(tmp_path: Path, release_trees: dict[str, Path]):
    stranger = Stranger(tmp_path, {v: release_trees[v] for v in ("0.15.3", "0.16.1")})
    steps = stranger.ran(f"mcore-bundle patches new {ID}")
    files = re.findall(r"[\w/]+\.py", steps.splitlines()[0])
    entry, wrapper, measurement, test = files

    stranger.edit(entry, ENTRY)
    areas, order = "from bundle.patches.catalogue import (\n", "_MODULES_IN_WRAP_ORDER = ("
    lines = {areas: f"{areas}    {MODULE},\n", order: f"{order}{MODULE}, "}
    stranger.edit("bundle/patches/catalogue/__init__.py", lines)

    review = stranger.ran(command(steps, "python -m tools.patches.review"))
    assert any(ID in line and "0.16.1" in line for line in review.splitlines())
    plan = command(steps, "mcore-bundle patches plan")
    assert re.search(rf"^APPLY +{ID}", stranger.ran(plan), re.MULTILINE)
    assert re.search(rf"^SKIP +{ID}", stranger.ran(plan.replace("0.16.1", "0.15.3")), re.MULTILINE)

    stranger.edit(measurement, MEASUREMENT)
    (check,) = re.findall(rf'"{ID}": build_check\(.*', steps)
    checks = "CHECKS_BY_PATCH_ID: dict[str, Check] = {  # by the patch's id\n"
    stranger.edit("bundle/verification/check.py", {checks: f"{checks}    {check}\n"})
    verify = command(steps, "PYTHONPATH=")
    assert ID in stranger.ran(verify, code=4)

    stranger.edit(wrapper, WRAPPER)
    assert stranger.ran(verify).startswith("proven")
    stranger.ran(command(steps, "python -m tools.patches.page"))
    stranger.ran(f"ruff format {' '.join(files)} && ruff check {' '.join(files)}")
    asked = command(steps, "BUNDLE_RELEASES=").partition(" tests/patches ")[0]
    assert test in asked
    others = "tests/tools/test_patches_page.py tests/verification/test_verify.py"
    chosen = "-m 'not matrix' -k 'test_it_is_proven or page or every_check'"
    assert "4 passed" in stranger.ran(f"{asked} {others} {chosen}")


def command(steps: str, beginning: str) -> str:
    """The command of the steps that begins so, without the sentence that it stands in."""
    (found,) = re.findall(rf"{re.escape(beginning)}[^\n]*", steps)
    return str(found).partition(" says ")[0]
