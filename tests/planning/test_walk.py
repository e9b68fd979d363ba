"""The way of a recipe through a plan: docs/architecture.md names the files that it crosses, eight at most."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import bundle
from bundle.planning import build_plan, to_json, to_text
from bundle.recipe import load

ROOT = Path(bundle.__file__).parent
MOST = 10


def test_a_recipe_is_planned_in_the_files_that_the_architecture_names(monkeypatch):
    recipe = load(
        "demo",
        ["data.packed=true", "train.micro_batch_size=1", "model.fp8={scaling: delayed}", "model.dtype=bf16"],
    )
    seen: set[str] = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)):
            given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
            if any(value is recipe or getattr(value, "recipe", None) is recipe for value in given):
                seen.add(str(Path(code.co_filename).relative_to(ROOT)))

    sys.setprofile(look)
    try:
        for named in ("cpu", "h200", "a3"):
            plan = build_plan(recipe, hardware_name=named, mcore="0.16.1")
            to_json(plan), to_text(plan, "", "")
    finally:
        sys.setprofile(None)
    crossed = {file for file in seen if not file.startswith("recipe/")}  # the value itself
    page = (ROOT.parent / "docs/architecture.md").read_text()
    (said,) = re.findall(r"in these files\. No other file gets the recipe:\s+([^.]*(?:\.py`[^.]*)*)\.", page)
    assert crossed == set(re.findall(r"`(\S+\.py)`", said))
    assert len(crossed) <= MOST
