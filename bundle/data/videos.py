"""Videos made into the patches that a tower takes, and the times at which these were.

As transformers' video processors of both families do: of a file so many frames a second are taken, of each
family by a rule of its own, and resized all alike; a list of frames is taken whole. Every
`temporal_patch_size` frames are one patch in time; the last one is repeated where they do not suffice.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from bundle.architectures import Vision
from bundle.data import films
from bundle.data.films import Film, Frame
from bundle.data.images import Patches, decoded, patches, resized
from bundle.data.media import VIDEO, Medium, Picture, content
from bundle.data.sources import Corrupt

_LIMIT = "data.videos.limit_pixels"


@dataclass(frozen=True)
class Videos:
    """How videos are read and made into patches; plain values, which worker processes are handed."""

    vision: Vision
    limit_bytes: int
    limit_pixels: int
    limit_frames: int
    limit_seconds: float
    fps: float
    min_frames: int
    max_frames: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def read(self, medium: Medium, folder: Path) -> Picture:
        """The video that a row names, decoded once. Raises Corrupt saying what is wrong with it."""
        listed = isinstance(medium.named, list)
        references = medium.named if listed else [medium.named]
        if len(references) > self.limit_frames:
            raise Corrupt(f"a video of {len(references)} frames exceeds data.videos.limit_frames")
        contents: list[bytes] = []
        for reference in references:
            room = self.limit_bytes - sum(map(len, contents))
            contents.append(content(reference, folder, room, VIDEO))
        named = Picture(tuple(contents), (0, 0, 0), fps=medium.fps or self.fps, listed=listed)
        film, numbers = self._taken(named)
        sizes = {frame.shape for frame in self._frames(named, numbers)}
        if len(sizes) > 1:
            shown = " and ".join(f"{width} x {height}" for height, width, _ in sorted(sizes)[:2])
            raise Corrupt(f"a video with frames of {shown} pixels: all must be alike")
        v, together = self.vision, self.vision.temporal_patch_size
        rows, columns = (side // v.patch_size for side in self._resized(film, len(numbers)))
        return named._replace(
            grid=(-(-len(numbers) // together), rows, columns),
            seconds=together / (len(numbers) / film.frames * film.fps),
            stamps=stamps([number / film.fps for number in numbers], together),
        )

    def patches(self, video: Picture) -> Patches:
        """The patches [n, values] of a video that `read` has accepted."""
        film, numbers = self._taken(video)
        size = self._resized(film, len(numbers))
        shown = [_to_size(frame, size) for frame in self._frames(video, numbers)]
        shown += shown[-1:] * (-len(shown) % self.vision.temporal_patch_size)
        return patches(np.stack(shown), self.vision, self.mean, self.std)

    def _taken(self, video: Picture) -> tuple[Film, list[int]]:
        """What a video is, and which of its frames are taken."""
        if video.listed:
            if not video.contents:
                raise Corrupt("a video without frames")
            height, width, _ = decoded(video.contents[0], self.limit_pixels, _LIMIT).shape
            film = Film(len(video.contents), video.fps, height, width)
        else:
            film = films.film(video.contents[0], self.limit_frames, self.limit_pixels)
        if film.seconds > self.limit_seconds:
            raise Corrupt(f"a video of {film.seconds:.0f} seconds exceeds data.videos.limit_seconds")
        numbers = list(range(film.frames)) if video.listed else self._sampled(film, video.fps)
        if len(numbers) < (together := self.vision.temporal_patch_size):
            raise Corrupt(f"{len(numbers)} of {film.frames} frames of a video: a patch has {together}")
        return film, numbers

    def _sampled(self, film: Film, fps: float) -> list[int]:
        """Which frames of a file are taken, about `fps` a second: each family has its own rule."""
        count, wanted = film.frames, film.frames / film.fps * fps
        if self.vision.frames_apart:
            many = min(max(int(wanted), self.min_frames), self.max_frames, count)
            found: list[int] = np.linspace(0, count - 1, many).round().astype(int).tolist()
            return found
        together = self.vision.temporal_patch_size
        most = min(self.max_frames, count) // together * together
        many = int(min(max(wanted, self.min_frames), most)) // together * together
        if not many:
            return []
        steps: list[int] = torch.arange(0, count, count / many).int().tolist()
        return steps[:many]  # rounding can bring forth one more, behind the last frame

    def _frames(self, video: Picture, numbers: Sequence[int]) -> Iterator[Frame]:
        if video.listed:
            return (decoded(of, self.limit_pixels, _LIMIT) for of in video.contents)
        return films.frames(video.contents[0], numbers)

    def _resized(self, film: Film, frames: int) -> tuple[int, int]:
        """Height and width; the numbers of pixels are of a frame, or of all where frames stand apart."""
        v, height, width = self.vision, film.height, film.width
        if not v.frames_apart:
            return resized(height, width, v, self.min_pixels, self.max_pixels)
        if (unit := v.patch_size * v.merge_size) > min(height, width):
            scale = max(unit / height, unit / width)
            height, width = int(height * scale), int(width * scale)
        counted = round(frames / v.temporal_patch_size) * v.temporal_patch_size
        return resized(height, width, v, self.min_pixels, self.max_pixels, frames=frames, counted=counted)


def stamps(times: Sequence[float], together: int) -> tuple[float, ...]:
    """The time of each patch of so many frames: the mean of its first and its last one."""
    lasts = [*times[together - 1 :: together], *(times[-1:] if len(times) % together else ())]
    return tuple((first + last) / 2 for first, last in zip(times[::together], lasts, strict=True))


def timed(
    text: str, parts: Sequence[tuple[int, int]], videos: Sequence[Picture], marks: tuple[str, str, str]
) -> tuple[str, list[tuple[int, int]]]:
    """A text in which every video is one frame after the other, each behind its time; and its parts, moved.

    `marks` are the texts of the tokens before a video, of it, and behind it. Raises Corrupt where the text
    has more or fewer places than videos are.
    """
    start, pad, end = marks
    whole = f"{start}{pad}{end}"
    places = list(re.finditer(f"{re.escape(whole)}|{re.escape(pad)}", text))
    if len(places) != len(videos):
        raise Corrupt(f"has {len(videos)} videos, and its text {len(places)} tokens for one ({pad})")
    said = ["".join(f"<{time:.1f} seconds>{whole}" for time in video.stamps) for video in videos]
    longer = [0, *accumulate(len(of) - len(place[0]) for of, place in zip(said, places, strict=True))]
    ends = [place.end() for place in places]

    def moved(at: int) -> int:
        return at + longer[sum(until <= at for until in ends)]

    frames = iter(said)
    written = re.sub(f"{re.escape(whole)}|{re.escape(pad)}", lambda _: next(frames), text)
    return written, [(moved(begin), moved(until)) for begin, until in parts]


def _to_size(frame: Frame, size: tuple[int, int]) -> Frame:
    """A frame [height, width, 3] in another size, by torch, as torchvision has it."""
    if frame.shape[:2] == size:
        return frame
    given = torch.from_numpy(np.array(frame)).permute(2, 0, 1)[None]
    made = functional.interpolate(given, size, mode="bicubic", antialias=True, align_corners=False)
    found: Frame = made[0].permute(1, 2, 0).numpy()
    return found
