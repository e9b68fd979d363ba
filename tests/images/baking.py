"""Targets of the bake file, changed to what can be built on this machine, and built."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.images.engine import Engine
from tests.images.machine import Passed

ROOT = Path(__file__).parents[2]
Target = dict[str, Any]

# Registries, labels' attestations and other machines' processors have no part in what is tested here.
_KEPT = ("context", "dockerfile", "target", "args", "labels", "contexts")


def resolved(engine: Engine, *names: str) -> dict[str, Target]:
    """Returns every target behind `names`, as bake resolves it."""
    # The files by name: a bake file that somebody left in the checkout is not the project's.
    made: dict[str, Target] = json.loads(engine.docker("buildx", "bake", *_files(), "--print", *names))["target"]
    return made


def here(engine: Engine, target: Target, base: str, passed: Passed) -> Target:
    """Returns the target on `base`, with what pip needs here and nothing that a registry would have to hold."""
    made = {key: target[key] for key in _KEPT if key in target}
    made["context"] = str(ROOT)
    made["args"] = {**made.get("args", {}), "BASE": base, "BASE_DIGEST": ""}
    made["contexts"] = dict(made.get("contexts", {}))
    if passed.wheelhouse:
        made["contexts"]["wheelhouse"] = str(passed.wheelhouse)
    made["secret"] = [{"type": "file", "id": name, "src": str(path)} for name, path in passed.secrets.items()]
    if engine.private:
        made["network"] = "host"  # the private engine has no bridge
    return made


def build(engine: Engine, folder: Path, targets: Mapping[str, Target], seconds: float = 1800) -> str:
    """Builds `targets`, with bake, out of a file in `folder`; returns the log."""
    file = folder / "bake.json"
    file.write_text(json.dumps({"target": targets}))
    result = engine.attempt(
        *("buildx", "bake", "--file", str(file), "--allow=network.host", "--allow=fs.read=/"),
        *("--progress=plain", *targets),
        seconds=seconds,
    )
    assert result.code == 0, result.err[-6000:]
    return result.err


def _files() -> list[str]:
    found = [ROOT / name for name in ("docker-bake.json", "docker-bake.hcl") if (ROOT / name).exists()]
    return [word for file in found for word in ("--file", str(file))]
