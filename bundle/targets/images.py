"""The choice of one of our images for a job, by backend and chip, where the user names none."""

import json
from pathlib import Path
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from bundle.errors import UsageError
from bundle.launch.job import Job

IMAGES_FILE = Path(__file__).with_name(
    "images.json"
)  # made of docker-bake.json by `python -m tools.images page`
# The user of our images, and the one directory that it may write to (images/README.md).
USER, HOME = 10001, "/home/bundle"
LOCAL_BUILD_IMAGE_PREFIX = "mcore-bundle"  # bake's default: images that were built on this machine


class Image(NamedTuple):
    """One image of the matrix. `tag` is its repository and tag; a registry and a slash come before it."""

    backend: str
    chip: str  # the device generation, as in `capabilities`; "" for all of the backend
    megatron: str
    tag: str


def load_images() -> list[Image]:
    """Return every image that bake builds."""
    return [Image(**row) for row in json.loads(IMAGES_FILE.read_text())]


def find_matching_name(job: Job, registry: str = LOCAL_BUILD_IMAGE_PREFIX) -> str:
    """Return the name of our image for a job. Raise UsageError with all images where none fits."""
    images = [image for image in load_images() if image.backend == job.backend]
    candidates = [image for image in images if image.chip in ("", job.generation)]
    for normalize in (str, _parse_minor):  # the exact version before the same minor
        for image in candidates:
            if normalize(image.megatron) == normalize(job.megatron):
                return f"{registry}/{image.tag}"
    chip = f" (device generation {job.generation})" if job.generation else ""
    raise UsageError(
        f"mcore-bundle has no image for {job.backend}{chip} and megatron-core {job.megatron}. Name an image"
        f" with --image. The images for {job.backend} are",
        [f"{image.tag} has megatron-core {image.megatron}" for image in images],
    )


def _parse_minor(version: str) -> tuple[int, ...]:
    try:
        return Version(version).release[:2]
    except InvalidVersion:
        return ()
