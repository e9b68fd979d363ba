"""How a job's images and videos become patches: what the recipe says, and its model's own files.

As in transformers, of both directories that a job has: the section of a processor in the file of all
processors, or else its own file, for videos also that of images.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bundle import files, hub
from bundle.architectures import Vision, from_config
from bundle.data.images import Images, Patches
from bundle.data.media import IMAGE, VIDEO, Medium, Picture
from bundle.data.sources import Corrupt
from bundle.data.videos import Videos
from bundle.errors import UsageError, shown
from bundle.recipe import Recipe
from bundle.recipe import data as asked

_NESTED = "processor_config.json"
_OWN = {
    IMAGE: ("preprocessor_config.json",),
    VIDEO: ("video_preprocessor_config.json", "preprocessor_config.json"),
}
# Of transformers' classes, where no file says otherwise: of images Qwen2VLImageProcessor, which all families
# have, of videos one for each way to take them, by whether frames stand apart.
_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HALVES = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
_OF_IMAGES = (56 * 56, 28 * 28 * 1280), _CLIP
_OF_VIDEOS = {
    False: ((128 * 28 * 28, 28 * 28 * 768), _CLIP),
    True: ((128 * 32 * 32, 32 * 32 * 768), _HALVES),
}
_FPS, _FRAMES = 2.0, (4, 768)
_MOST = 2**31 - 1


@dataclass(frozen=True)
class Processing:
    """How a model is given images and videos; plain values, which worker processes are handed."""

    images: Images
    videos: Videos

    @classmethod
    def of(cls, recipe: Recipe) -> "Processing | None":
        """That of a recipe; None where its model sees nothing. Raises UsageError for unusable settings."""
        if recipe.architecture.vision is None:
            return None
        kind, _, tokenizer = recipe.data.tokenizer.partition(":")
        places = [recipe.model.path, tokenizer if kind == "hf" else None]
        directories = [Path(hub.local_path(place)) for place in places if place]
        return cls._made(recipe.architecture.vision, directories, recipe.data.images, recipe.data.videos)

    @classmethod
    def of_directory(cls, directory: Path) -> "Processing | None":
        """That of a Hugging Face directory, where no recipe says more; None where its model sees nothing."""
        config = directory / "config.json"
        vision = from_config(files.json_object(config), str(config)).vision
        if vision is None:
            return None
        return cls._made(vision, [directory], asked.Images(), asked.Videos())

    @classmethod
    def _made(
        cls,
        vision: Vision,
        directories: Sequence[Path],
        of_images: asked.Images,
        of_videos: asked.Videos,
    ) -> "Processing":
        return cls(_images(vision, directories, of_images), _videos(vision, directories, of_videos))

    @property
    def vision(self) -> Vision:
        """The tower."""
        return self.images.vision

    def read(self, medium: Medium, folder: Path) -> Picture:
        """The image or video that a row names, decoded once. Raises Corrupt, which names its file."""
        try:
            return self._read(medium, folder)
        except Corrupt as error:
            if not isinstance(medium.named, str) or medium.named.startswith("data:"):
                raise
            before = f"{medium.kind} {shown(medium.named)}"
            raise Corrupt(str(error) if str(error).startswith(before) else f"{before}: {error}") from error

    def _read(self, medium: Medium, folder: Path) -> Picture:
        if medium.kind == IMAGE:
            return self.images.read(medium.named, folder)
        v = self.vision
        if v.video_token is None or (v.frames_apart and None in (v.start_token, v.end_token)):
            raise Corrupt("has videos, and the model's config names no video_token_id, or none around it")
        return self.videos.read(medium, folder)

    def patches(self, picture: Picture) -> Patches:
        """The patches [n, values] of what `read` has accepted."""
        return self.videos.patches(picture) if picture.seconds else self.images.patches(picture.contents[0])


def _images(vision: Vision, directories: Sequence[Path], limits: asked.Images) -> Images:
    where, said = _settings(directories, IMAGE, vision)
    pixels, colours = _OF_IMAGES
    least, most = _pixels(said, limits, pixels, "data.images", where)
    return Images(vision, limits.limit_bytes, limits.limit_pixels, least, most, *_colours(said, colours))


def _videos(vision: Vision, directories: Sequence[Path], limits: asked.Videos) -> Videos:
    where, said = _settings(directories, VIDEO, vision)
    pixels, colours = _OF_VIDEOS[vision.frames_apart]
    if vision.frames_apart:  # its class knows no other words
        said = {name: value for name, value in said.items() if name not in ("min_pixels", "max_pixels")}
    least, most = _pixels(said, limits, pixels, "data.videos", where)
    fewest, many = (
        getattr(limits, name) or said.get(name) or own
        for name, own in zip(("min_frames", "max_frames"), _FRAMES, strict=True)
    )
    if fewest > many:
        raise UsageError(f"data.videos: min_frames {fewest} exceeds max_frames {many}{where}")
    return Videos(
        vision,
        limits.limit_bytes,
        limits.limit_pixels,
        limits.limit_frames,
        limits.limit_seconds,
        limits.fps or said.get("fps") or _FPS,
        fewest,
        many,
        least,
        most,
        *_colours(said, colours),
    )


def _pixels(
    said: Mapping[str, Any],
    limits: asked.Images | asked.Videos,
    own: tuple[int, int],
    section: str,
    where: str,
) -> tuple[int, int]:
    """The least and the most pixels: what the recipe says, or the files, or transformers' class."""
    size = said.get("size") or {}
    least = limits.min_pixels or said.get("min_pixels") or size.get("shortest_edge") or own[0]
    most = limits.max_pixels or said.get("max_pixels") or size.get("longest_edge") or own[1]
    if least > most:
        raise UsageError(f"{section}: min_pixels {least} exceeds max_pixels {most}{where}")
    return least, most


def _colours(said: Mapping[str, Any], own: tuple[Sequence[float], Sequence[float]]) -> Iterator[tuple]:
    return (tuple(said.get(f"image_{of}") or value) for of, value in zip(("mean", "std"), own, strict=True))


def _settings(directories: Sequence[Path], kind: str, vision: Vision) -> tuple[str, dict[str, Any]]:
    """What the first directory says of its processor, and where, for messages; ("", {}) where none does.

    Raises UsageError for what is not computed and what is no value of its kind, by name.
    """
    for at in directories:
        there = {
            name: files.json_object(at / name) for name in (_NESTED, *_OWN[kind]) if files.is_file(at / name)
        }
        there[_NESTED] = there.get(_NESTED, {}).get(f"{kind}_processor") or {}
        for name, said in there.items():
            if not isinstance(said, dict):
                raise UsageError(f"{at / name}: {kind}_processor must be a JSON object")
            if said:
                if wrong := [*_others(said, vision), *_unfit(said)]:
                    raise UsageError(f"{at / name}: {kind}s are not processed in this way", wrong)
                return f" ({at / name})", said
    return "", {}


def _others(said: Mapping[str, Any], vision: Vision) -> Iterator[str]:
    """What a processor is told to do in another way than is done here."""
    done: dict[str, Any] = dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), True)
    done |= dict.fromkeys(("do_center_crop", "do_pad", "cap_pixels_per_frame", "num_frames"))
    done |= {"resample": 3, "rescale_factor": 1 / 255, "patch_size": vision.patch_size}
    done |= {"temporal_patch_size": vision.temporal_patch_size, "merge_size": vision.merge_size}
    for name, own in done.items():
        value = said.get(name)
        if value is not None and value != own and (value or own is not None):
            yield f"{name} {shown(value)}" + ("" if own is None else f": must be {own:g}")


def _unfit(said: Mapping[str, Any]) -> Iterator[str]:
    """What a processor is told with a value that cannot be one."""
    size = said.get("size") or {}
    if not isinstance(size, Mapping):
        yield f"size {shown(size)}: must be a JSON object"
        size = {}
    counts = {name: said.get(name) for name in ("min_pixels", "max_pixels", "min_frames", "max_frames")}
    counts |= {f"size.{edge}": size.get(edge) for edge in ("shortest_edge", "longest_edge")}
    for name, value in counts.items():
        if value is not None and not (type(value) is int and 0 < value <= _MOST):
            yield f"{name} {shown(value)}: must be a whole number from 1 to {_MOST}"
    if (fps := said.get("fps")) is not None and not (_is_number(fps) and fps > 0):
        yield f"fps {shown(fps)}: must be a number above 0"
    for name, least in (("image_mean", -math.inf), ("image_std", 0.0)):
        value = said.get(name)
        if value is None:
            continue
        three = isinstance(value, Sequence) and len(value) == 3 and all(map(_is_number, value))
        if not three or not all(of > least for of in value):
            yield f"{name} {shown(value)}: must be three numbers" + (" above 0" if least == 0 else "")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _MOST  # nor is NaN one
