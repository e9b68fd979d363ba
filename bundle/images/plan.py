"""What `docker buildx bake --print` says will be built: the part of it that others rely on."""

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from bundle.errors import UsageError

LARGEST = 4 << 20

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
        found = [
            f"{'.'.join(map(str, e['loc']))[:200]!r}: {e['msg']}" for e in error.errors(include_url=False)
        ]
        raise UsageError("bake --print: not a plan", found[:50]) from error


def json_object(document: str, origin: str) -> dict[str, Any]:
    """The one JSON object in `document`. Raises UsageError naming `origin`."""
    try:
        found = json.loads(document) if len(document) <= LARGEST else None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{origin}: {str(error)[:200]}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{origin}: must be one JSON object of at most {LARGEST >> 20} MiB")
    return found
