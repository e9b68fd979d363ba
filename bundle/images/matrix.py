"""The jobs of the build workflow, from what `bake --print` says: one for each image and platform."""

import json
import re
from collections.abc import Mapping
from typing import Any

from bundle.errors import UsageError

LARGEST = 4 << 20
# Native machines: an emulated build of torch extensions takes a day.
RUNNERS = {"linux/amd64": "ubuntu-24.04", "linux/arm64": "ubuntu-24.04-arm"}

# These words go into a workflow's expressions and a shell: nothing else may be in them.
_TARGET = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


def matrix(printed: str, now: Mapping[str, str], before: Mapping[str, str]) -> list[dict[str, str]]:
    """[{target, platform, runner}] of every image whose inputs are not what they were `before`.

    `now` and `before` are target -> digest. Raises UsageError with everything that is wrong in `printed`.
    """
    jobs, wrong = [], []
    for name, target in _targets(printed).items():
        if not _TARGET.fullmatch(name):
            wrong.append(f"{name[:80]!r} is no name of a target")
        elif not isinstance(target, dict) or not isinstance(target.get("platforms", []), list):
            wrong.append(f"{name}: not as bake prints it")
        elif target.get("tags") and (name not in now or now[name] != before.get(name)):
            for platform in target.get("platforms") or ["linux/amd64"]:
                if platform in RUNNERS:
                    jobs.append({"target": name, "platform": platform, "runner": RUNNERS[platform]})
                else:
                    wrong.append(
                        f"{name}: no runner for {str(platform)[:40]!r}; there are {', '.join(RUNNERS)}"
                    )
    if wrong:
        raise UsageError("bake's plan cannot be made jobs of", wrong[:50])
    return jobs


def digests(document: str, origin: str) -> dict[str, str]:
    """Target -> digest, from what `images fingerprint --json` printed. Raises UsageError."""
    found = _object(document, origin)
    if not all(isinstance(digest, str) for digest in found.values()):
        raise UsageError(f"{origin}: must be {{target: digest}}")
    return found


def _targets(printed: str) -> dict[str, Any]:
    targets = _object(printed, "bake --print").get("target")
    if not isinstance(targets, dict):
        raise UsageError('bake --print: no object "target" in it')
    return targets


def _object(document: str, origin: str) -> dict[str, Any]:
    try:
        found = json.loads(document) if len(document) <= LARGEST else None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{origin}: {str(error)[:200]}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{origin}: must be one JSON object of at most {LARGEST >> 20} MiB")
    return found
