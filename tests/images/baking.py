"""Targets of the bake file, changed to what can be built on this machine, and built."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.images import standin
from tests.images.engine import Engine
from tests.images.machine import Passed
from tools.images import definition

ROOT = Path(__file__).parents[2]
# By name: a bake file that somebody left in the checkout is not the project's.
_FILES = (f"--file={ROOT}/docker-bake.json", f"--file={ROOT}/docker-bake.hcl")
Target = dict[str, Any]

# Registries, labels' attestations and other machines' processors have no part in what is tested here.
_KEPT = ("context", "dockerfile", "target", "args", "labels", "contexts")


def resolved(engine: Engine, *names: str) -> dict[str, Target]:
    """Returns every target behind `names`, as bake resolves it."""
    printed = engine.docker("buildx", "bake", *_FILES, "--print", *names)
    made: dict[str, Target] = json.loads(printed)["target"]
    return made


def here(engine: Engine, target: Target, passed: Passed) -> Target:
    """Returns the target on bases that this machine has, with what pip needs, and nothing of a registry's.

    Raises Missing where there is no base.
    """
    made = {key: target[key] for key in _KEPT if key in target}
    made["context"] = str(ROOT)
    made["args"] = {**made["args"], **_bases(engine, made["args"])}
    made["contexts"] = dict(made.get("contexts", {}))
    if passed.wheelhouse:
        made["args"] |= {"TORCH_INDEX": ""} if "TORCH_INDEX" in made["args"] else {}
        made["contexts"].setdefault("wheelhouse", str(passed.wheelhouse))
    made["secret"] = [{"type": "file", "id": name, "src": str(path)} for name, path in passed.secrets.items()]
    made["output"] = [{"type": "cacheonly"}]
    if engine.private:
        made["network"] = "host"  # the private engine has no bridge
    return made


def _bases(engine: Engine, arguments: Mapping[str, str]) -> dict[str, str]:
    known = {base.image: base for base in definition.load(ROOT).bases.values()}
    found = {}
    for name, digest in (("BASE", "BASE_DIGEST"), ("BUILD_BASE", "BUILD_DIGEST")):
        if name in arguments:
            found[name], found[digest] = standin.image(engine, known[arguments[name]])
    return found


def build(
    engine: Engine, folder: Path, targets: Mapping[str, Target], *options: str, seconds: float = 1800
) -> str:
    """Builds `targets`, with bake, out of a file in `folder`; returns the log."""
    file = folder / "bake.json"
    file.write_text(json.dumps({"target": targets}))
    result = engine.attempt(
        *("buildx", "bake", "--file", str(file), "--allow=network.host", "--allow=fs.read=/"),
        *("--progress=plain", *options, *targets),
        seconds=seconds,
    )
    assert result.code == 0, result.err[-6000:]
    return result.out + result.err
