"""Read files of moving pictures: animated GIF, WebP and PNG with Pillow, and films with PyAV."""

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bundle.data.images import import_pillow_image_module, strip_buffer_name_from_error
from bundle.data.sources import CorruptData
from bundle.errors import EnvironmentUnfit

ANIMATION_FORMATS = ("GIF", "WEBP", "PNG")
# FFmpeg's demuxers that do not read other files or URLs.
VIDEO_DEMUXERS = ("mov", "mp4", "matroska", "webm", "avi", "mpeg", "mpegts", "ogg", "flv")

Frame = NDArray[np.uint8]  # [height, width, 3]


class VideoMetadata(NamedTuple):
    """The facts about a file that are known without its pictures."""

    frames: int
    fps: float  # the mean over all frames
    height: int
    width: int

    @property
    def seconds(self) -> float:
        """The length of the video."""
        return self.frames / self.fps


def read_metadata(content: bytes, limit_frames: int, limit_pixels: int) -> VideoMetadata:
    """Return the metadata of a file. Raise CorruptData for what is not a video or exceeds limits."""
    with _open_video(content) as file:
        return file.read_metadata(limit_frames, limit_pixels)


def decode_frames(content: bytes, numbers: Sequence[int]) -> Iterator[Frame]:
    """Yield some frames of a file by their ascending numbers; a number may repeat. Raise CorruptData."""
    frame_numbers, at = list(numbers), 0
    with _open_video(content) as file:
        for number, picture in enumerate(file.iterate_pictures()):
            if at < len(frame_numbers) and frame_numbers[at] == number:
                frame = file.to_rgb_array(picture)
                while at < len(frame_numbers) and frame_numbers[at] == number:
                    yield frame
                    at += 1
            if at == len(frame_numbers):
                return
    raise CorruptData(f"a video ends before its frame {frame_numbers[at]}: the file is truncated")


class _Animation:
    """Pictures of one file, which Pillow shows one after the other."""

    def __init__(self, content: bytes) -> None:
        self._image = import_pillow_image_module().open(io.BytesIO(content), formats=ANIMATION_FORMATS)

    def read_metadata(self, limit_frames: int, limit_pixels: int) -> VideoMetadata:
        count, (width, height) = getattr(self._image, "n_frames", 1), self._image.size
        _check_limits(count, limit_frames, width, height, limit_pixels)
        milliseconds = sum(picture.info.get("duration", 0) for picture in self.iterate_pictures())
        if not milliseconds > 0:
            raise CorruptData("a video whose frames have no durations: name them as a list, with fps")
        return VideoMetadata(count, 1000 * count / milliseconds, height, width)

    def iterate_pictures(self) -> Iterator[Any]:
        for number in range(getattr(self._image, "n_frames", 1)):
            self._image.seek(number)
            self._image.load()
            yield self._image

    def to_rgb_array(self, picture: Any) -> Frame:
        return np.asarray(picture.convert("RGB"))

    def close(self) -> None:
        self._image.close()


class _VideoStream:
    """The first video of a file, as FFmpeg decodes it."""

    def __init__(self, content: bytes) -> None:
        try:
            import av
        except ImportError as error:
            raise EnvironmentUnfit(
                f"videos that are no animated images need PyAV: pip install 'mcore-bundle[video]' ({error})"
            ) from error
        options = {"format_whitelist": ",".join(VIDEO_DEMUXERS), "protocol_whitelist": "file"}
        self._container = av.open(io.BytesIO(content), options=options, metadata_errors="ignore")
        if not self._container.streams.video:
            raise CorruptData("the file has no video stream")
        self._stream = self._container.streams.video[0]

    def read_metadata(self, limit_frames: int, limit_pixels: int) -> VideoMetadata:
        stream, count = self._stream, self._stream.frames
        if not count:  # not said: there is a frame in each packet
            count = sum(1 for packet in self._container.demux(stream) if packet.size)
        _check_limits(count, limit_frames, stream.width, stream.height, limit_pixels)
        if not count or not stream.average_rate:
            raise CorruptData("a video that has neither a frame count nor a frame rate")
        return VideoMetadata(count, float(stream.average_rate), stream.height, stream.width)

    def iterate_pictures(self) -> Iterator[Any]:
        self._container.seek(0)
        yield from self._container.decode(self._stream)

    def to_rgb_array(self, picture: Any) -> Frame:
        frame: Frame = picture.to_ndarray(format="rgb24")
        return frame

    def close(self) -> None:
        self._container.close()


def _check_limits(count: int, limit_frames: int, width: int, height: int, limit_pixels: int) -> None:
    if count > limit_frames:
        raise CorruptData(f"a video of {count} frames exceeds data.videos.limit_frames")
    if width * height > limit_pixels:
        raise CorruptData(f"a video of {width} x {height} pixels exceeds data.videos.limit_pixels")


@contextmanager
def _open_video(content: bytes) -> Iterator["_Animation | _VideoStream"]:
    """Open the file, and close it at the end; any error of a decoder becomes CorruptData."""
    is_animation = content[:4] in (b"GIF8", b"\x89PNG") or (content[:4], content[8:12]) == (b"RIFF", b"WEBP")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            file = _Animation(content) if is_animation else _VideoStream(content)
            try:
                yield file
            finally:
                file.close()
    except (CorruptData, EnvironmentUnfit):
        raise
    except Exception as error:
        kinds = f"{', '.join(ANIMATION_FORMATS)} or {', '.join(VIDEO_DEMUXERS)}"
        raise CorruptData(
            f"no video in {kinds} that can be decoded ({strip_buffer_name_from_error(error)})"
        ) from error
