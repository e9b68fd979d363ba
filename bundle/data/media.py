"""Find the images and videos that rows name, in the order of their places in conversations, and read them."""

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from bundle import files
from bundle.data.sources import CorruptData
from bundle.errors import format_count, format_value
from bundle.recipe.data import Fields

IMAGE, VIDEO = "image", "video"
MEDIA_KINDS = (IMAGE, VIDEO)
# The types of a message's part in Hugging Face's and OpenAI's formats.
MEDIA_KIND_BY_PART_TYPE = {"image": IMAGE, "image_url": IMAGE, "video": VIDEO, "video_url": VIDEO}
MEDIA_KIND_BY_PLACEHOLDER = {
    f"<{kind}>": kind for kind in MEDIA_KINDS
}  # where one of the row's own field stands in a text
# The keys in published rows; the first is the default of `data.fields`, which means all of them.
MEDIA_KEYS_BY_KIND = {
    IMAGE: ("images", "image", "image_path", "image_paths"),
    VIDEO: ("videos", "video", "video_path", "video_paths"),
}
_FPS_KEYS = ("fps", "sample_fps")  # of a video, in the words of Qwen's tools
_REFERENCE_KEYS = ("path", "url", "base64", "bytes")
_URL_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_FILE_URL_PREFIX_PATTERN = re.compile(r"file://(localhost(?=/))?", re.IGNORECASE)
_DATA_URL_PREFIX_PATTERN = re.compile(r"data:(image|video)/[\w.+-]+;base64,")


class Medium(NamedTuple):
    """An image or a video as a row names it: by a path, base64 or bytes; a video also by a list of frames."""

    kind: str
    reference: Any
    fps: float | None = None  # of a list: its frames per second; of a file: those that are taken


class Picture(NamedTuple):
    """The files of an image or a video, and the numbers of its patches in time, height and width.

    `fps` of a video is the value of its row or of the recipe. `is_frame_list` says whether it has a file for
    each frame. `seconds` is the time from one of its patches to the next; 0 for an image.
    """

    contents: tuple[bytes, ...]
    grid: tuple[int, int, int]
    seconds: float = 0.0
    fps: float = 0.0
    is_frame_list: bool = False
    timestamps: tuple[float, ...] = ()  # the time of each of its patches [seconds]; not stored


class RowColumn(NamedTuple):
    """The images, or the videos, that a row names outside its messages, and under which key."""

    key: str
    media: Sequence[Any] = ()


def list_media_keys(fields: Fields) -> tuple[str, ...]:
    """Return the keys of a row that may name images and videos."""
    return tuple(key for keys in _map_media_keys(fields).values() for key in keys)


def find_columns_by_kind(values: Mapping[str, Any], fields: Fields) -> dict[str, RowColumn]:
    """Return the images and videos of a row by kind; a kind that `data.fields` sets to null is absent.

    Raise CorruptData where two keys of a row name different ones.
    """
    return {kind: _find_media_by_keys(values, keys) for kind, keys in _map_media_keys(fields).items()}


def _map_media_keys(fields: Fields) -> dict[str, tuple[str, ...]]:
    names = {IMAGE: fields.images, VIDEO: fields.videos}
    return {
        kind: MEDIA_KEYS_BY_KIND[kind] if name == MEDIA_KEYS_BY_KIND[kind][0] else (name,)
        for kind, name in names.items()
        if name
    }


def _find_media_by_keys(values: Mapping[str, Any], keys: Sequence[str]) -> RowColumn:
    columns = [RowColumn(key, media) for key in keys if (media := _to_list(values.get(key)))]
    for other in columns[1:]:
        if other.media != columns[0].media:
            both = f"{columns[0].key} and {other.key}"
            raise CorruptData(
                f"fields {both} disagree: they name different images or videos. Choose one field with"
                " data.fields"
            )
    return columns[0] if columns else RowColumn(", ".join(keys))


def pop_media(messages: Sequence[dict[str, Any]], columns: Mapping[str, RowColumn]) -> list[Medium]:
    """Return the images and videos of a conversation in order, and leave only their places in its messages.

    A part of a message names its own, or takes the next of the row's column for its kind. The marks <image>
    and <video> in a text take the next one too; without a column for its kind a mark is text.

    Raise CorruptData where a column has more or fewer than there are places.
    """
    media = []
    for number, message in enumerate(messages):
        if unread_keys := [key for kind in columns for key in MEDIA_KEYS_BY_KIND[kind] if message.get(key)]:
            raise CorruptData(
                f"message {number}: {unread_keys[0]} in a message is not read. Move it to a field of the row"
            )
        if message["role"] == "assistant":
            continue
        content = _with_media_parts(message["content"], [f"<{kind}>" for kind in columns])
        if not isinstance(content, str):
            named = [part for part in content if part["type"] in MEDIA_KINDS]
            media += [Medium(part["type"], part.get(part["type"]), part.get("fps")) for part in named]
            content = [{"type": part["type"]} if part in named else part for part in content]
        message["content"] = content
    remaining = {}
    for kind in MEDIA_KINDS:
        column = columns.get(kind, RowColumn(f"data.fields.{kind}s: null"))
        places = sum(medium.kind == kind and medium.reference is None for medium in media)
        if places != len(column.media):
            plain = f". Where <{kind}> is plain text, set data.fields.{kind}s: null"
            raise CorruptData(
                f"{column.key}: names {format_count(len(column.media), kind)}, but the messages have"
                f" {format_count(places, 'place')} for {kind}s (<{kind}>, or a part of type {kind}). Name"
                f" one {kind} for each place" + (plain if kind in columns and not column.media else "")
            )
        remaining[kind] = iter(column.media)
    return [
        medium._replace(reference=next(remaining[medium.kind])) if medium.reference is None else medium
        for medium in media
    ]


def _with_media_parts(content: Any, marks: Sequence[str]) -> Any:
    """Return the content of a message with a part for each mark; unchanged where it has no mark."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    split = []
    for part in parts:
        text = part.get("text", "")
        if not any(mark in text for mark in marks):
            split.append(part)
            continue
        pieces = re.split(f"({'|'.join(marks)})", text)
        split += [
            {"type": MEDIA_KIND_BY_PLACEHOLDER[piece]} if piece in marks else {"type": "text", "text": piece}
            for piece in pieces
            if piece
        ]
    return content if split == parts else split


def _to_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [] if value in (None, "") else [value]


def normalize_media_part(part: Mapping[str, Any], field_path: str) -> dict[str, Any]:
    """Return a part of a message that is an image or a video: {type, image} or {type, video}.

    The part is only {type} where the row's own field names the file.
    """
    kind = MEDIA_KIND_BY_PART_TYPE[part["type"]]
    keys = (kind, f"{kind}_url", *_REFERENCE_KEYS)
    named = [part[key] for key in keys if part.get(key) is not None]
    if len(named) > 1:
        used = " and ".join(key for key in keys if part.get(key) is not None)
        raise CorruptData(
            f"{field_path} names {_add_article(kind)} more than once, by the keys {used}. Keep one"
        )
    if part.get("base64") is not None:
        named = [{"base64": named[0]}]
    elif named and isinstance(named[0], Mapping) and "url" in named[0]:  # image_url: {url: ...}
        named = [named[0]["url"]]
    media_part = {"type": kind, **({kind: named[0]} if named else {})}
    if kind == VIDEO:
        media_part |= _read_rate(part, field_path)
        if unread_keys := sorted(
            {key for key in part if part[key] is not None} - {"type", *keys, *_FPS_KEYS}
        ):
            raise CorruptData(f"{field_path} has {unread_keys[0]} for a video, but a video may set only fps")
    return media_part


def _read_rate(part: Mapping[str, Any], field_path: str) -> dict[str, float]:
    """Return {fps} where a part has a frame rate, else an empty mapping."""
    named = {key: part[key] for key in _FPS_KEYS if part.get(key) is not None}
    rates = list(named.values())
    if any(type(rate) not in (int, float) or not 0 < rate < 1e6 or rate != rates[0] for rate in rates):
        raise CorruptData(
            f"{field_path}: a video has one frame rate, fps, above 0 frames per second, but this video has"
            f" {format_value(named)}"
        )
    return {"fps": float(rates[0])} if rates else {}


def _add_article(kind: str) -> str:
    return f"an {kind}" if kind == IMAGE else f"a {kind}"


def read_content(reference: Any, folder: Path, limit: int, kind: str) -> bytes:
    """Return the bytes of a file inside `folder`, of base64, or of bytes as they are.

    Raise CorruptData for all else, and for more than `limit` bytes.
    """
    if isinstance(reference, Mapping):  # as data sets have it in parquet: bytes, or a path
        named = [reference[key] for key in ("bytes", "base64", "path") if reference.get(key) is not None]
        if not named:
            raise CorruptData(
                f"{_add_article(kind)} must be a path, base64 or bytes, but is"
                f" {format_value(dict(reference))}"
            )
        coded = reference.get("bytes") is None and reference.get("base64") is not None
        reference = f"data:{kind}/any;base64,{named[0]}" if coded else named[0]
    if isinstance(reference, str) and (prefix := _DATA_URL_PREFIX_PATTERN.match(reference)):
        try:
            reference = base64.b64decode(reference[prefix.end() :], validate=True)
        except ValueError as error:
            raise CorruptData(f"{_add_article(kind)} is not in base64: {error}") from error
    if isinstance(reference, str):
        return _read_file(reference, folder, limit, kind)
    if not isinstance(reference, bytes):
        raise CorruptData(
            f"{_add_article(kind)} must be a path, base64 or bytes, but is {format_value(reference)}"
        )
    if len(reference) > limit:
        raise CorruptData(f"{_add_article(kind)} of {len(reference)} bytes exceeds data.{kind}s.limit_bytes")
    return reference


def _read_file(name: str, folder: Path, limit: int, kind: str) -> bytes:
    if prefix := _FILE_URL_PREFIX_PATTERN.match(name):
        name = unquote(name[prefix.end() :])
    elif _URL_PATTERN.match(name):
        raise CorruptData(
            f"{kind} {format_value(name)} is a URL, and only local files are read. Download it next to"
            " the rows"
        )
    try:
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise CorruptData(
                f"{kind} {format_value(name)} is outside of the folder of the data file. Move the {kind} into"
                " this folder"
            )
        return files.read_content(path, limit)
    except (OSError, ValueError, RuntimeError) as error:  # the latter of links that go round
        reason = getattr(error, "strerror", None) or error
        raise CorruptData(f"{kind} {format_value(name)}: {reason}") from error
