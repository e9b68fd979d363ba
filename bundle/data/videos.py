"""Make videos into the patches that a vision tower takes, and give the times of the patches.

This follows transformers' video processors of both families. From a file, some frames a second are taken, by
a rule of each family, and resized alike. A list of frames is taken whole. Every `temporal_patch_size` frames
are one patch in time; the last frame is repeated where they do not suffice.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from bundle.architectures import VisionArchitecture
from bundle.data import video_decoding
from bundle.data.images import Patches, compute_size, decode_image, extract_patches
from bundle.data.media import VIDEO, Medium, Picture, read_content
from bundle.data.sources import CorruptData
from bundle.data.video_decoding import Frame, VideoMetadata
from bundle.errors import format_count

_PIXEL_LIMIT_RECIPE_KEY = "data.videos.limit_pixels"


@dataclass(frozen=True)
class VideoProcessor:
    """How videos are read and made into patches; plain values, which worker processes are handed."""

    vision: VisionArchitecture
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

    def read_bytes_and_grid(self, medium: Medium, folder: Path) -> Picture:
        """Return the video that a row names, decoded once. Raise CorruptData, which says what is wrong."""
        is_frame_list = isinstance(medium.reference, list)
        references = medium.reference if is_frame_list else [medium.reference]
        if len(references) > self.limit_frames:
            raise CorruptData(f"a video of {len(references)} frames exceeds data.videos.limit_frames")
        contents: list[bytes] = []
        for reference in references:
            bytes_left = self.limit_bytes - sum(map(len, contents))
            contents.append(read_content(reference, folder, bytes_left, VIDEO))
        video = Picture(tuple(contents), (0, 0, 0), fps=medium.fps or self.fps, is_frame_list=is_frame_list)
        metadata, numbers = self._choose_frames(video)
        sizes = {frame.shape for frame in self._read_frames(video, numbers)}
        if len(sizes) > 1:
            shown = " and ".join(f"{width} x {height}" for height, width, _ in sorted(sizes)[:2])
            raise CorruptData(f"a video with frames of {shown} pixels: all must be alike")
        v, frames_per_patch = self.vision, self.vision.temporal_patch_size
        rows, columns = (side // v.patch_size for side in self._compute_size(metadata, len(numbers)))
        return video._replace(
            grid=(-(-len(numbers) // frames_per_patch), rows, columns),
            seconds=frames_per_patch / (len(numbers) / metadata.frames * metadata.fps),
            timestamps=compute_timestamps([number / metadata.fps for number in numbers], frames_per_patch),
        )

    def extract_patches(self, video: Picture) -> Patches:
        """Return the patches [n, values] of a video that `read` has accepted."""
        metadata, numbers = self._choose_frames(video)
        size = self._compute_size(metadata, len(numbers))
        shown = [_resize_frame(frame, size) for frame in self._read_frames(video, numbers)]
        shown += shown[-1:] * (-len(shown) % self.vision.temporal_patch_size)
        return extract_patches(np.stack(shown), self.vision, self.mean, self.std)

    def _choose_frames(self, video: Picture) -> tuple[VideoMetadata, list[int]]:
        """Return the metadata of a video, and the numbers of the frames that are taken."""
        if video.is_frame_list:
            if not video.contents:
                raise CorruptData("a video without frames")
            height, width, _ = decode_image(
                video.contents[0], self.limit_pixels, _PIXEL_LIMIT_RECIPE_KEY
            ).shape
            metadata = VideoMetadata(len(video.contents), video.fps, height, width)
        else:
            metadata = video_decoding.read_metadata(video.contents[0], self.limit_frames, self.limit_pixels)
        if metadata.seconds > self.limit_seconds:
            raise CorruptData(f"a video of {metadata.seconds:.0f} seconds exceeds data.videos.limit_seconds")
        numbers = (
            list(range(metadata.frames)) if video.is_frame_list else self._sample_frames(metadata, video.fps)
        )
        if len(numbers) < (frames_per_patch := self.vision.temporal_patch_size):
            raise CorruptData(
                f"{len(numbers)} of {metadata.frames} frames of a video: a patch has {frames_per_patch},"
                " so they are too few"
            )
        return metadata, numbers

    def _sample_frames(self, metadata: VideoMetadata, fps: float) -> list[int]:
        """Return the frames to take of a file, about `fps` a second; each family has its own rule."""
        count, target_count = metadata.frames, metadata.frames / metadata.fps * fps
        if self.vision.has_frame_timestamps:
            many = min(max(int(target_count), self.min_frames), self.max_frames, count)
            numbers: list[int] = np.linspace(0, count - 1, many).round().astype(int).tolist()
            return numbers
        frames_per_patch = self.vision.temporal_patch_size
        most = min(self.max_frames, count) // frames_per_patch * frames_per_patch
        many = int(min(max(target_count, self.min_frames), most)) // frames_per_patch * frames_per_patch
        if not many:
            return []
        steps: list[int] = torch.arange(0, count, count / many).int().tolist()
        return steps[:many]  # rounding can bring forth one more, behind the last frame

    def _read_frames(self, video: Picture, numbers: Sequence[int]) -> Iterator[Frame]:
        if video.is_frame_list:
            return (
                decode_image(frame_content, self.limit_pixels, _PIXEL_LIMIT_RECIPE_KEY)
                for frame_content in video.contents
            )
        return video_decoding.decode_frames(video.contents[0], numbers)

    def _compute_size(self, metadata: VideoMetadata, frames: int) -> tuple[int, int]:
        """Return height and width.

        The limits of pixels apply to one frame, or to all frames where they are separate.
        """
        v, height, width = self.vision, metadata.height, metadata.width
        if not v.has_frame_timestamps:
            return compute_size(height, width, v, self.min_pixels, self.max_pixels)
        if (unit := v.patch_size * v.merge_size) > min(height, width):
            scale = max(unit / height, unit / width)
            height, width = int(height * scale), int(width * scale)
        counted_frames = round(frames / v.temporal_patch_size) * v.temporal_patch_size
        return compute_size(
            height, width, v, self.min_pixels, self.max_pixels, frames=frames, counted_frames=counted_frames
        )


def compute_timestamps(times: Sequence[float], frames_per_patch: int) -> tuple[float, ...]:
    """Return the time of each patch of so many frames: the mean of its first and its last frame's times."""
    lasts = [
        *times[frames_per_patch - 1 :: frames_per_patch],
        *(times[-1:] if len(times) % frames_per_patch else ()),
    ]
    return tuple((first + last) / 2 for first, last in zip(times[::frames_per_patch], lasts, strict=True))


def insert_frame_times(
    text: str, parts: Sequence[tuple[int, int]], videos: Sequence[Picture], marks: tuple[str, str, str]
) -> tuple[str, list[tuple[int, int]]]:
    """Return a text with the frames of each video one by one, each behind its time, and its moved parts.

    `marks` are the texts of the tokens before a video, for it, and behind it. Raise CorruptData where the
    text has more or fewer places than there are videos.
    """
    start, pad, end = marks
    frame_text = f"{start}{pad}{end}"
    places = list(re.finditer(f"{re.escape(frame_text)}|{re.escape(pad)}", text))
    if len(places) != len(videos):
        raise CorruptData(
            f"the row has {format_count(len(videos), 'video')}, but its text has"
            f" {format_count(len(places), 'video token')} ({pad})"
        )
    video_texts = [
        "".join(f"<{time:.1f} seconds>{frame_text}" for time in video.timestamps) for video in videos
    ]
    longer = [
        0,
        *accumulate(
            len(video_text) - len(place[0]) for video_text, place in zip(video_texts, places, strict=True)
        ),
    ]
    ends = [place.end() for place in places]

    def shift_position(at: int) -> int:
        return at + longer[sum(until <= at for until in ends)]

    frames = iter(video_texts)
    written = re.sub(f"{re.escape(frame_text)}|{re.escape(pad)}", lambda _: next(frames), text)
    return written, [(shift_position(begin), shift_position(until)) for begin, until in parts]


def _resize_frame(frame: Frame, size: tuple[int, int]) -> Frame:
    """Return a frame [height, width, 3] in another size, computed with torch as torchvision does."""
    if frame.shape[:2] == size:
        return frame
    pixels = torch.from_numpy(np.array(frame)).permute(2, 0, 1)[None]
    scaled = functional.interpolate(pixels, size, mode="bicubic", antialias=True, align_corners=False)
    result: Frame = scaled[0].permute(1, 2, 0).numpy()
    return result
