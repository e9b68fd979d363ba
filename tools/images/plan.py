"""What `docker buildx bake --print` says will be built, and the jobs of the build workflow for it."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from bundle.errors import UsageError, format_validation_errors

LARGEST = 4 << 20
# Native machines: an emulated build of torch extensions takes a day.
RUNNERS = {"linux/amd64": "ubuntu-24.04", "linux/arm64": "ubuntu-24.04-arm"}

# A target's name goes into a workflow's expressions and a shell: nothing but these may be in it.
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]


class Planned(BaseModel):
    """One target; an image has tags, and what is only an image's ingredient has none."""

    model_config = ConfigDict(frozen=True, strict=True)

    dockerfile: str = "Dockerfile"
    args: dict[str, str] = {}
    labels: dict[str, str] = {}
    tags: list[str] = []
    platforms: list[str] = []


_TARGETS = TypeAdapter(dict[Name, Planned])


def read(printed: str) -> dict[str, Planned]:
    """Target -> what is planned for it. Raises UsageError with everything that is wrong in `printed`."""
    targets = json_object(printed, "bake --print").get("target")
    try:
        return _TARGETS.validate_python(targets)
    except ValidationError as error:
        raise UsageError("bake --print: not a plan", format_validation_errors(error)[:50]) from error


def json_object(document: str, origin: str) -> dict[str, Any]:
    """The one JSON object in `document`. Raises UsageError naming `origin`."""
    try:
        found = json.loads(document) if len(document) <= LARGEST else None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{origin}: {str(error)[:200]}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{origin}: must be one JSON object of at most {LARGEST >> 20} MiB")
    return found


def matrix(
    plan: Mapping[str, Planned], now: Mapping[str, str], before: Mapping[str, str]
) -> list[dict[str, str]]:
    """[{target, platform, runner}] of every image whose inputs are not what they were `before`.

    `now` and `before` are target -> digest. Raises UsageError with every platform that nobody can build for.
    """
    changed = [name for name in plan if name not in now or now[name] != before.get(name)]
    jobs = [(name, platform) for name in changed if plan[name].tags for platform in _platforms(plan[name])]
    lost = sorted({f"{name}: {platform[:40]!r}" for name, platform in jobs if platform not in RUNNERS})
    if lost:
        raise UsageError(f"no runner for a platform; there are {', '.join(RUNNERS)}", lost[:50])
    return [{"target": name, "platform": platform, "runner": RUNNERS[platform]} for name, platform in jobs]


def digests(document: str, origin: str) -> dict[str, str]:
    """Target -> digest, from what `images fingerprint --json` printed. Raises UsageError."""
    found = json_object(document, origin)
    if not all(isinstance(digest, str) for digest in found.values()):
        raise UsageError(f"{origin}: must be {{target: digest}}")
    return found


def _platforms(target: Planned) -> list[str]:
    return target.platforms or ["linux/amd64"]
