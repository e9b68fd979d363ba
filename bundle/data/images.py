"""Images of rows: found in conversations, read within limits, made into the patches that a tower takes.

Patches are those of transformers' Qwen2VLImageProcessor with Pillow: an image is resized, with its
proportions kept as far as patches allow; its patches follow each other in squares of those that are merged.
"""

import base64
import io
import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bundle import files
from bundle.architectures import Vision
from bundle.data.sources import Corrupt
from bundle.errors import EnvironmentUnfit, UsageError, shown
from bundle.recipe import Recipe

FORMATS = ("JPEG", "PNG", "WEBP")
MARK = "<image>"  # where an image of the row's own field stands in a text
MOST_UNEQUAL = 200  # times that an image may be as high as wide, or as wide as high
_KEYS = ("image", "image_url", "path", "url", "base64", "bytes")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_DATA = re.compile(r"data:image/[\w.+-]+;base64,")
# Of transformers' Qwen2VLImageProcessor, which all families have, where no file says otherwise.
_PIXELS = (56 * 56, 28 * 28 * 1280)
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_NESTED, _OWN = "processor_config.json", "preprocessor_config.json"


class Picture(NamedTuple):
    """An image as its file has it, and its patches in time, height and width."""

    content: bytes
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class Processing:
    """How images are read and made into patches; plain values, which worker processes are handed."""

    vision: Vision
    limit_bytes: int
    limit_pixels: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...] = _MEAN
    std: tuple[float, ...] = _STD

    @classmethod
    def of(cls, recipe: Recipe) -> "Processing | None":
        """That of a recipe; None where its model sees no images. Raises UsageError for unusable settings."""
        vision, limits = recipe.architecture.vision, recipe.data.images
        if vision is None:
            return None
        kind, _, tokenizer = recipe.data.tokenizer.partition(":")
        places = [recipe.model.path, tokenizer if kind == "hf" else None]
        said = _settings([Path(place) for place in places if place])
        size = said.get("size") or {}
        least = limits.min_pixels or said.get("min_pixels") or size.get("shortest_edge") or _PIXELS[0]
        most = limits.max_pixels or said.get("max_pixels") or size.get("longest_edge") or _PIXELS[1]
        if not 0 < least <= most:
            raise UsageError(f"data.images: min_pixels {least} exceeds max_pixels {most}")
        mean, std = (tuple(said.get(f"image_{of}", own)) for of, own in (("mean", _MEAN), ("std", _STD)))
        return cls(vision, limits.limit_bytes, limits.limit_pixels, least, most, mean, std)

    def read(self, reference: Any, folder: Path) -> Picture:
        """The image that a row names, decoded once. Raises Corrupt saying what is wrong with it."""
        content = _content(reference, folder, self.limit_bytes)
        height, width, _ = self._decoded(content).shape
        rows, columns = (side // self.vision.patch_size for side in self._resized(height, width))
        return Picture(content, (1, rows, columns))

    def patches(self, content: bytes) -> NDArray[np.float32]:
        """The patches [n, values] of an image that `read` has accepted."""
        from PIL import Image

        pixels, v = self._decoded(content), self.vision
        height, width = self._resized(*pixels.shape[:2])
        if pixels.shape[:2] != (height, width):
            resized = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
            pixels = np.asarray(resized)
        mean, std = (np.asarray(of, np.float32) for of in (self.mean, self.std))
        scaled = (pixels.astype(np.float32) * np.float32(1 / 255) - mean) / std
        rows, columns = height // v.patch_size // v.merge_size, width // v.patch_size // v.merge_size
        squares = scaled.reshape(rows, v.merge_size, v.patch_size, columns, v.merge_size, v.patch_size, 3)
        # [rows, columns, in the square, in the square, channels, height, width]
        ordered = squares.transpose(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None]
        frames = np.repeat(ordered, v.temporal_patch_size, 5)  # of a still image all are alike
        return frames.reshape(-1, v.patch_values)

    def _decoded(self, content: bytes) -> NDArray[np.uint8]:
        """[height, width, 3], upright."""
        try:
            from PIL import Image, ImageOps
        except ImportError as error:
            raise EnvironmentUnfit(f"images need Pillow: pip install pillow ({error})") from error
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about sizes, which are looked at here
                with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                    if image.width * image.height > self.limit_pixels:
                        size = f"{image.width} x {image.height} pixels"
                        raise Corrupt(f"an image of {size} exceeds data.images.limit_pixels")
                    upright = ImageOps.exif_transpose(image).convert("RGB")
        except Corrupt:
            raise
        except Exception as error:  # decoders raise what they like about a file
            raise Corrupt(f"no image in {', '.join(FORMATS)} that can be decoded ({error})") from error
        return np.asarray(upright)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width in whole squares of patches, between the two numbers of pixels."""
        unit = self.vision.patch_size * self.vision.merge_size
        if max(height, width) > MOST_UNEQUAL * min(height, width):
            size = f"{width} x {height} pixels"
            raise Corrupt(f"an image of {size}: one side is over {MOST_UNEQUAL} times the other")
        rows, columns = round(height / unit) * unit, round(width / unit) * unit
        if rows * columns > self.max_pixels:
            factor = math.sqrt(height * width / self.max_pixels)
            rows, columns = (max(unit, math.floor(n / factor / unit) * unit) for n in (height, width))
        elif rows * columns < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(n * factor / unit) * unit for n in (height, width))
        return rows, columns


def placed(messages: Sequence[dict[str, Any]], column: Any) -> list[Any]:
    """What names the images of a conversation, in order; in its messages only their places are left.

    A part of a message names its image itself, or takes the next of the row's own field (`column`), as the
    mark <image> in a text does. Raises Corrupt where there are more or fewer of these than places.
    """
    if column is not None and not isinstance(column, list):
        column = [column]
    waiting, found = list(column or ()), []
    for message in messages:
        content = message["content"]
        if column and isinstance(content, str) and MARK in content and message["role"] != "assistant":
            texts = content.split(MARK)
            parts = [part for text in texts for part in ({"type": "text", "text": text}, {"type": "image"})]
            content = message["content"] = [part for part in parts[:-1] if part.get("text") != ""]
        if isinstance(content, str):
            continue
        for part in content:
            if part["type"] == "image":
                named = part.pop("image", None)
                if named is None and not waiting:
                    raise Corrupt("more places for images than the row has images")
                found.append(waiting.pop(0) if named is None else named)
    if waiting:
        raise Corrupt(f"{len(waiting)} images of the row have no place in a message (<image>, or a part)")
    return found


def part(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A part of a message that is an image: {type, image}, or {type} where the row's field has it."""
    named = [given[key] for key in _KEYS if given.get(key) is not None]
    if len(named) > 1:
        raise Corrupt(f"{where} names an image more than once: {shown(dict(given))}")
    if given.get("base64") is not None:
        named = [{"base64": named[0]}]
    elif named and isinstance(named[0], Mapping) and "url" in named[0]:  # image_url: {url: ...}
        named = [named[0]["url"]]
    return {"type": "image", **({"image": named[0]} if named else {})}


def _content(reference: Any, folder: Path, limit: int) -> bytes:
    """The bytes of an image by its path inside `folder`, in base64, or as they are."""
    if isinstance(reference, Mapping):  # as data sets have it in parquet: bytes, or a path
        named = [reference[key] for key in ("bytes", "base64", "path") if reference.get(key) is not None]
        if not named:
            raise Corrupt(f"an image must be a path, base64 or bytes, is {shown(dict(reference))}")
        coded = reference.get("bytes") is None and reference.get("base64") is not None
        reference = f"data:image/any;base64,{named[0]}" if coded else named[0]
    if isinstance(reference, str) and (prefix := _DATA.match(reference)):
        try:
            reference = base64.b64decode(reference[prefix.end() :], validate=True)
        except ValueError as error:
            raise Corrupt(f"an image is not in base64: {error}") from error
    if isinstance(reference, str):
        return _of_file(reference, folder, limit)
    if not isinstance(reference, bytes):
        raise Corrupt(f"an image must be a path, base64 or bytes, is {shown(reference)}")
    if len(reference) > limit:
        raise Corrupt(f"an image of {len(reference)} bytes exceeds data.images.limit_bytes")
    return reference


def _of_file(name: str, folder: Path, limit: int) -> bytes:
    if _URL.match(name):
        raise Corrupt(f"image {shown(name)} is a URL: only files beside the rows are read; download it")
    try:
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise Corrupt(f"image {shown(name)} is outside of the folder that its row lies in")
        return files.content(path, limit)
    except (OSError, ValueError, RuntimeError) as error:  # the latter of links that go round
        why = getattr(error, "strerror", None) or error
        raise Corrupt(f"image {shown(name)}: {why}") from error


def _settings(directories: Sequence[Path]) -> dict[str, Any]:
    """What the first of these says of its image processor; {} where none does.

    As transformers has it: the section of one in the file of all processors, or else its own file.
    """
    for at in directories:
        for path in (at / _NESTED, at / _OWN):
            said = _object(path) if files.is_file(path) else {}
            if path.name == _NESTED:
                said = said.get("image_processor") or {}
            if not isinstance(said, dict):
                raise UsageError(f"{path}: image_processor must be a JSON object")
            if said:
                return said
    return {}


def _object(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(files.content(path, 2**20))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    if not isinstance(said, dict):
        raise UsageError(f"{path}: must hold a JSON object")
    return said
