"""Choose how a job's images and videos become patches, by the recipe and by the files of its model.

A job has up to two directories, and the first with settings counts, as in transformers. The settings stand in
the processor's section of the file of all processors, or else in its own file. Videos may also use the file
of images.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bundle import files, hub
from bundle.architectures import VisionArchitecture, from_config
from bundle.data.images import ImageProcessor, Patches
from bundle.data.media import IMAGE, VIDEO, Medium, Picture
from bundle.data.sources import CorruptData
from bundle.data.videos import VideoProcessor
from bundle.errors import UsageError, format_value
from bundle.recipe import Recipe
from bundle.recipe import data as recipe_data

_COMBINED_PROCESSOR_CONFIG_FILE = "processor_config.json"
_PREPROCESSOR_CONFIG_FILES = {
    IMAGE: ("preprocessor_config.json",),
    VIDEO: ("video_preprocessor_config.json", "preprocessor_config.json"),
}
# Defaults of transformers' classes: Qwen2VLImageProcessor for images of all families; for videos one class
# for each way to take them, by whether frames are separate.
_CLIP_MEAN_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HALF_MEAN_STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
_DEFAULT_PIXEL_LIMITS_MEAN_STD = (56 * 56, 28 * 28 * 1280), _CLIP_MEAN_STD
_VIDEO_DEFAULTS_BY_SEPARATE_FRAMES = {
    False: ((128 * 28 * 28, 28 * 28 * 768), _CLIP_MEAN_STD),
    True: ((128 * 32 * 32, 32 * 32 * 768), _HALF_MEAN_STD),
}
_DEFAULT_FPS, _FRAME_LIMITS = 2.0, (4, 768)
_MAX_SETTING_VALUE = 2**31 - 1


@dataclass(frozen=True)
class MediaProcessor:
    """How a model is given images and videos; plain values, which worker processes are handed."""

    images: ImageProcessor
    videos: VideoProcessor

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> "MediaProcessor | None":
        """Return the processor of a recipe; None where its model takes no images.

        Raise UsageError for unusable settings.
        """
        if recipe.architecture.vision is None:
            return None
        kind, _, tokenizer = recipe.data.tokenizer.partition(":")
        places = [recipe.model.path, tokenizer if kind == "hf" else None]
        directories = [Path(hub.build_cache_path_if_pinned(place)) for place in places if place]
        return cls._build(recipe.architecture.vision, directories, recipe.data.images, recipe.data.videos)

    @classmethod
    def from_directory(cls, directory: Path) -> "MediaProcessor | None":
        """Return the processor of a Hugging Face directory; None where its model takes no images."""
        config = directory / "config.json"
        vision = from_config(files.read_json_object(config), str(config)).vision
        if vision is None:
            return None
        return cls._build(vision, [directory], recipe_data.ImagesSection(), recipe_data.VideosSection())

    @classmethod
    def _build(
        cls,
        vision: VisionArchitecture,
        directories: Sequence[Path],
        image_settings: recipe_data.ImagesSection,
        video_settings: recipe_data.VideosSection,
    ) -> "MediaProcessor":
        return cls(
            _build_image_processor(vision, directories, image_settings),
            _build_video_processor(vision, directories, video_settings),
        )

    @property
    def vision(self) -> VisionArchitecture:
        """The vision tower."""
        return self.images.vision

    def read_bytes_and_grid(self, medium: Medium, folder: Path) -> Picture:
        """Return the medium that a row names, decoded once. Raise CorruptData, which names the file."""
        try:
            return self._read_by_kind(medium, folder)
        except CorruptData as error:
            if not isinstance(medium.reference, str) or medium.reference.startswith("data:"):
                raise
            before = f"{medium.kind} {format_value(medium.reference)}"
            raise CorruptData(
                str(error) if str(error).startswith(before) else f"{before}: {error}"
            ) from error

    def _read_by_kind(self, medium: Medium, folder: Path) -> Picture:
        if medium.kind == IMAGE:
            return self.images.read_bytes_and_grid(medium.reference, folder)
        v = self.vision
        if v.video_token is None or (v.has_frame_timestamps and None in (v.start_token, v.end_token)):
            raise CorruptData(
                "the model's config has no video_token_id, or no start and end tokens for it, which"
                " videos need"
            )
        return self.videos.read_bytes_and_grid(medium, folder)

    def extract_patches(self, picture: Picture) -> Patches:
        """Return the patches [n, values] of an image or video that `read` has accepted."""
        return (
            self.videos.extract_patches(picture)
            if picture.seconds
            else self.images.extract_patches(picture.contents[0])
        )


def _build_image_processor(
    vision: VisionArchitecture, directories: Sequence[Path], limits: recipe_data.ImagesSection
) -> ImageProcessor:
    location, settings = _read_settings(directories, IMAGE, vision)
    pixels, colours = _DEFAULT_PIXEL_LIMITS_MEAN_STD
    least, most = _choose_pixel_limits(settings, limits, pixels, "data.images", location)
    return ImageProcessor(
        vision, limits.limit_bytes, limits.limit_pixels, least, most, *_read_mean_and_std(settings, colours)
    )


def _build_video_processor(
    vision: VisionArchitecture, directories: Sequence[Path], limits: recipe_data.VideosSection
) -> VideoProcessor:
    location, settings = _read_settings(directories, VIDEO, vision)
    pixels, colours = _VIDEO_DEFAULTS_BY_SEPARATE_FRAMES[vision.has_frame_timestamps]
    if vision.has_frame_timestamps:  # its class knows no other words
        settings = {
            name: value for name, value in settings.items() if name not in ("min_pixels", "max_pixels")
        }
    least, most = _choose_pixel_limits(settings, limits, pixels, "data.videos", location)
    fewest, many = (
        getattr(limits, name) or settings.get(name) or default
        for name, default in zip(("min_frames", "max_frames"), _FRAME_LIMITS, strict=True)
    )
    if fewest > many:
        raise UsageError(f"data.videos: min_frames {fewest} exceeds max_frames {many}{location}")
    return VideoProcessor(
        vision,
        limits.limit_bytes,
        limits.limit_pixels,
        limits.limit_frames,
        limits.limit_seconds,
        limits.fps or settings.get("fps") or _DEFAULT_FPS,
        fewest,
        many,
        least,
        most,
        *_read_mean_and_std(settings, colours),
    )


def _choose_pixel_limits(
    settings: Mapping[str, Any],
    limits: recipe_data.ImagesSection | recipe_data.VideosSection,
    defaults: tuple[int, int],
    section: str,
    location: str,
) -> tuple[int, int]:
    """Return the least and the most pixels, by the recipe, else the files, else transformers' class."""
    size = settings.get("size") or {}
    least = limits.min_pixels or settings.get("min_pixels") or size.get("shortest_edge") or defaults[0]
    most = limits.max_pixels or settings.get("max_pixels") or size.get("longest_edge") or defaults[1]
    if least > most:
        raise UsageError(f"{section}: min_pixels {least} exceeds max_pixels {most}{location}")
    return least, most


def _read_mean_and_std(
    settings: Mapping[str, Any], defaults: tuple[Sequence[float], Sequence[float]]
) -> Iterator[tuple]:
    return (
        tuple(settings.get(f"image_{name}") or value)
        for name, value in zip(("mean", "std"), defaults, strict=True)
    )


def _read_settings(
    directories: Sequence[Path], kind: str, vision: VisionArchitecture
) -> tuple[str, dict[str, Any]]:
    """Return the place and the settings of the first directory that has any; ("", {}) where none does.

    The place is text for messages. Raise UsageError that names each setting which is not supported or has an
    invalid value.
    """
    for directory in directories:
        sections = {
            name: files.read_json_object(directory / name)
            for name in (_COMBINED_PROCESSOR_CONFIG_FILE, *_PREPROCESSOR_CONFIG_FILES[kind])
            if files.is_file(directory / name)
        }
        sections[_COMBINED_PROCESSOR_CONFIG_FILE] = (
            sections.get(_COMBINED_PROCESSOR_CONFIG_FILE, {}).get(f"{kind}_processor") or {}
        )
        for name, settings in sections.items():
            if not isinstance(settings, dict):
                raise UsageError(f"{directory / name}: {kind}_processor must be a JSON object")
            if settings:
                if wrong := [*_list_unsupported(settings, vision), *_list_invalid(settings)]:
                    raise UsageError(
                        f"{directory / name}: these settings of the {kind} processor are not supported", wrong
                    )
                return f" ({directory / name})", settings
    return "", {}


def _list_unsupported(settings: Mapping[str, Any], vision: VisionArchitecture) -> Iterator[str]:
    """Yield a line for each setting of a processor that asks for another way than the one computed here."""
    supported: dict[str, Any] = dict.fromkeys(
        ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), True
    )
    supported |= dict.fromkeys(("do_center_crop", "do_pad", "cap_pixels_per_frame", "num_frames"))
    supported |= {"resample": 3, "rescale_factor": 1 / 255, "patch_size": vision.patch_size}
    supported |= {"temporal_patch_size": vision.temporal_patch_size, "merge_size": vision.merge_size}
    for name, default in supported.items():
        value = settings.get(name)
        if value is not None and value != default and (value or default is not None):
            yield f"{name} {format_value(value)}" + (
                ": must be unset" if default is None else f": must be {default:g}"
            )


def _list_invalid(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each setting of a processor that has an invalid value."""
    size = settings.get("size") or {}
    if not isinstance(size, Mapping):
        yield f"size {format_value(size)}: must be a JSON object"
        size = {}
    counts = {name: settings.get(name) for name in ("min_pixels", "max_pixels", "min_frames", "max_frames")}
    counts |= {f"size.{edge}": size.get(edge) for edge in ("shortest_edge", "longest_edge")}
    for name, value in counts.items():
        if value is not None and not (type(value) is int and 0 < value <= _MAX_SETTING_VALUE):
            yield f"{name} {format_value(value)}: must be a whole number from 1 to {_MAX_SETTING_VALUE}"
    if (fps := settings.get("fps")) is not None and not (_is_bounded_number(fps) and fps > 0):
        yield f"fps {format_value(fps)}: must be a number above 0"
    for name, least in (("image_mean", -math.inf), ("image_std", 0.0)):
        value = settings.get(name)
        if value is None:
            continue
        is_triple = isinstance(value, Sequence) and len(value) == 3 and all(map(_is_bounded_number, value))
        if not is_triple or not all(number > least for number in value):
            yield f"{name} {format_value(value)}: must be three numbers" + (" above 0" if least == 0 else "")


def _is_bounded_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _MAX_SETTING_VALUE  # nor is NaN one
