"""Make images into the patches that a vision tower takes.

Patches are those of transformers' Qwen2VLImageProcessor with Pillow. An image is resized and keeps its
proportions as far as patches allow. Its patches follow each other in squares of those that are merged.
"""

import io
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bundle.architectures import VisionArchitecture
from bundle.data.media import IMAGE, Picture, read_content
from bundle.data.sources import CorruptData
from bundle.errors import EnvironmentUnfit

Patches = NDArray[np.float32]  # [n, values of a patch]
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP")
MAX_ASPECT_RATIO = 200  # times that an image may be as high as wide, or as wide as high


@dataclass(frozen=True)
class ImageProcessor:
    """How images are read and made into patches; plain values, which worker processes are handed."""

    vision: VisionArchitecture
    limit_bytes: int
    limit_pixels: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def read_bytes_and_grid(self, reference: Any, folder: Path) -> Picture:
        """Return the image that a row names, decoded once. Raise CorruptData, which says what is wrong."""
        image_bytes = read_content(reference, folder, self.limit_bytes, IMAGE)
        height, width, _ = decode_image(image_bytes, self.limit_pixels).shape
        rows, columns = (side // self.vision.patch_size for side in self._compute_size(height, width))
        return Picture((image_bytes,), (1, rows, columns))

    def extract_patches(self, content: bytes) -> Patches:
        """Return the patches [n, values] of an image that `read` has accepted."""
        from PIL import Image

        pixels = decode_image(content, self.limit_pixels)
        height, width = self._compute_size(*pixels.shape[:2])
        if pixels.shape[:2] != (height, width):
            resized = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
            pixels = np.asarray(resized)
        # All frames of a still image are alike.
        frames = np.broadcast_to(pixels, (self.vision.temporal_patch_size, *pixels.shape))
        return extract_patches(frames, self.vision, self.mean, self.std)

    def _compute_size(self, height: int, width: int) -> tuple[int, int]:
        return compute_size(height, width, self.vision, self.min_pixels, self.max_pixels)


def extract_patches(
    frames: NDArray[np.uint8], vision: VisionArchitecture, mean: Sequence[float], std: Sequence[float]
) -> Patches:
    """Return the patches [n, values] of frames [t, height, width, 3]; t is a multiple of a patch's frames."""
    times, unit = len(frames) // vision.temporal_patch_size, vision.patch_size * vision.merge_size
    rows, columns, square = (
        frames.shape[1] // unit,
        frames.shape[2] // unit,
        (vision.merge_size, vision.patch_size),
    )
    offset, scale = (np.asarray(values, np.float32) for values in (mean, std))
    scaled: Patches = (frames.astype(np.float32) * np.float32(1 / 255) - offset) / scale
    cut = scaled.reshape(times, vision.temporal_patch_size, rows, *square, columns, *square, 3)
    # [times, rows, columns, in the square, in the square, channels, frames, height, width]
    return cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, vision.values_per_patch)


def decode_image(
    content: bytes, limit_pixels: int, limit_key: str = "data.images.limit_pixels"
) -> NDArray[np.uint8]:
    """Return an image [height, width, 3], upright.

    Raise CorruptData for an image with more pixels than `limit_key` allows.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sizes, which are looked at here
            with import_pillow_image_module().open(io.BytesIO(content), formats=IMAGE_FORMATS) as image:
                if image.width * image.height > limit_pixels:
                    raise CorruptData(
                        f"an image of {image.width} x {image.height} pixels exceeds {limit_key}"
                    )
                from PIL import ImageOps

                upright = ImageOps.exif_transpose(image).convert("RGB")
    except (CorruptData, EnvironmentUnfit):
        raise
    except Exception as error:  # decoders raise what they like about a file
        kinds = f"{', '.join(IMAGE_FORMATS[:-1])} or {IMAGE_FORMATS[-1]}"
        raise CorruptData(
            f"the image cannot be decoded as {kinds} ({strip_buffer_name_from_error(error)}). Save it again"
        ) from error
    return np.asarray(upright)


def strip_buffer_name_from_error(error: Exception) -> str:
    """Return the message of a decoder's error without the name of the bytes in memory."""
    return re.sub(r" ?<_io\.BytesIO[^>]*>", "", str(error))


def import_pillow_image_module() -> Any:
    """Return Pillow's module of images. Raise EnvironmentUnfit where Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise EnvironmentUnfit(f"images need Pillow: pip install 'mcore-bundle[data]' ({error})") from error
    return Image


def compute_size(
    height: int,
    width: int,
    vision: VisionArchitecture,
    min_pixels: int,
    max_pixels: int,
    *,
    frames: int = 1,
    counted_frames: int = 1,
) -> tuple[int, int]:
    """Return the height and width in whole squares of patches at which `frames` keep the limits of pixels.

    The limits `min_pixels` and `max_pixels` are compared with the pixels of `counted_frames` frames. Raise
    CorruptData where one side is over `MAX_ASPECT_RATIO` times the other.
    """
    unit = vision.patch_size * vision.merge_size
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        size = f"{width} x {height} pixels"
        raise CorruptData(f"an image of {size}: one side is over {MAX_ASPECT_RATIO} times the other")
    rows, columns = round(height / unit) * unit, round(width / unit) * unit
    if counted_frames * rows * columns > max_pixels:
        factor = math.sqrt(frames * height * width / max_pixels)
        rows, columns = (max(unit, math.floor(n / factor / unit) * unit) for n in (height, width))
    elif counted_frames * rows * columns < min_pixels:
        factor = math.sqrt(min_pixels / (frames * height * width))
        rows, columns = (math.ceil(n * factor / unit) * unit for n in (height, width))
    return rows, columns
