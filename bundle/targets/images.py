"""Which image of ours a job runs in, where nobody names one: what bake builds for backend and chip."""

import json
from pathlib import Path
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from bundle.errors import UsageError
from bundle.launch.job import Job

FILE = Path(__file__).with_name("images.json")  # made of docker-bake.json by `python -m tools.images page`
DEFAULT_REGISTRY = "mcore-bundle"  # bake's own: what was built on this machine


class Image(NamedTuple):
    """One image of the matrix: `tag` is its repository and tag, which follow a registry and a slash."""

    backend: str
    chip: str  # the generation that it is for, as `capabilities` know it; "" for all of the backend
    megatron: str
    tag: str


def load_images() -> list[Image]:
    """Every image that bake builds."""
    return [Image(**row) for row in json.loads(FILE.read_text())]


def choose_image(job: Job, registry: str = DEFAULT_REGISTRY) -> str:
    """The image of ours for a job. Raises UsageError with those that there are, where none is for it."""
    images = [image for image in load_images() if image.backend == job.backend]
    candidates = [image for image in images if image.chip in ("", job.generation)]
    for normalize in (str, _parse_minor):  # of two with one minor, the one that has the very version
        for image in candidates:
            if normalize(image.megatron) == normalize(job.megatron):
                return f"{registry}/{image.tag}"
    chip = f", {job.generation}" if job.generation else ""
    raise UsageError(
        f"no image of ours is for {job.backend}{chip} and megatron-core {job.megatron}:"
        " name one with --image",
        [f"{image.tag} has megatron-core {image.megatron}" for image in images],
    )


def _parse_minor(version: str) -> tuple[int, ...]:
    try:
        return Version(version).release[:2]
    except InvalidVersion:
        return ()
