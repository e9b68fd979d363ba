"""Images and videos that rows name: found in conversations, in the order of their places, and read."""

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bundle import files
from bundle.data.sources import Corrupt
from bundle.errors import shown

IMAGE, VIDEO = "image", "video"
KINDS = (IMAGE, VIDEO)
# What a part of a message is called, in the words of Hugging Face and of OpenAI.
TYPES = {"image": IMAGE, "image_url": IMAGE, "video": VIDEO, "video_url": VIDEO}
MARKS = {f"<{kind}>": kind for kind in KINDS}  # where one of the row's own field stands in a text
_RATES = ("fps", "sample_fps")  # of a video, in the words of Qwen's tools
_NAMING = ("path", "url", "base64", "bytes")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_DATA = re.compile(r"data:(image|video)/[\w.+-]+;base64,")


class Medium(NamedTuple):
    """An image or a video as a row names it: by a path, base64 or bytes; a video also by a list of frames."""

    kind: str
    named: Any
    fps: float | None = None  # of a list: its frames per second; of a file: those that are taken


class Picture(NamedTuple):
    """An image or a video as its files have it, and its patches in time, height and width.

    Of a video `fps` is what its row or the recipe says, `listed` whether it has a file for each frame,
    `seconds` the time from one of its patches to the next; 0 for an image.
    """

    contents: tuple[bytes, ...]
    grid: tuple[int, int, int]
    seconds: float = 0.0
    fps: float = 0.0
    listed: bool = False
    stamps: tuple[float, ...] = ()  # the time of each of its patches [seconds]; not stored


def placed(messages: Sequence[dict[str, Any]], columns: Mapping[str, Any]) -> list[Medium]:
    """The images and videos of a conversation, in order; in its messages only their places are left.

    A part of a message names its own, or takes the next of the row's field for its kind (`columns`), as the
    marks <image> and <video> in a text do. Raises Corrupt where there are more or fewer of these than places.
    """
    waiting = {kind: _listed(columns.get(kind)) for kind in KINDS}
    marks = "|".join(mark for mark, kind in MARKS.items() if waiting[kind])
    found = []
    for message in messages:
        content = message["content"]
        if isinstance(content, str) and marks and message["role"] != "assistant":
            pieces = re.split(f"({marks})", content)
            if len(pieces) > 1:
                parts = [
                    {"type": MARKS[of]} if of in MARKS else {"type": "text", "text": of} for of in pieces
                ]
                content = message["content"] = [part for part in parts if part.get("text") != ""]
        if isinstance(content, str):
            continue
        for part in content:
            if (kind := part["type"]) in KINDS:
                named, fps = part.pop(kind, None), part.pop("fps", None)
                if named is None and not waiting[kind]:
                    raise Corrupt(f"more places for {kind}s than the row has {kind}s")
                found.append(Medium(kind, waiting[kind].pop(0) if named is None else named, fps))
    for kind, left in waiting.items():
        if left:
            raise Corrupt(f"{len(left)} {kind}s of the row have no place in a message (<{kind}>, or a part)")
    return found


def _listed(column: Any) -> list[Any]:
    return list(column) if isinstance(column, list) else [] if column is None else [column]


def part(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A part of a message that is an image or a video: {type, image}; {type} where the row's field has it."""
    kind = TYPES[given["type"]]
    keys = (kind, f"{kind}_url", *_NAMING)
    named = [given[key] for key in keys if given.get(key) is not None]
    if len(named) > 1:
        raise Corrupt(f"{where} names {_a(kind)} more than once: {shown(dict(given))}")
    if given.get("base64") is not None:
        named = [{"base64": named[0]}]
    elif named and isinstance(named[0], Mapping) and "url" in named[0]:  # image_url: {url: ...}
        named = [named[0]["url"]]
    made = {"type": kind, **({kind: named[0]} if named else {})}
    if kind == VIDEO:
        made |= _rate(given, where)
        if others := sorted({key for key in given if given[key] is not None} - {"type", *keys, *_RATES}):
            raise Corrupt(f"{where} says {others[0]} of a video: of one fps alone is read")
    return made


def _rate(given: Mapping[str, Any], where: str) -> dict[str, float]:
    """{fps} where a part says so."""
    said = [given[key] for key in _RATES if given.get(key) is not None]
    if any(type(rate) not in (int, float) or not 0 < rate < 1e6 or rate != said[0] for rate in said):
        raise Corrupt(f"{where}: fps must be frames per second, above 0, is {shown(dict(given))}")
    return {"fps": float(said[0])} if said else {}


def _a(kind: str) -> str:
    return f"an {kind}" if kind == IMAGE else f"a {kind}"


def content(reference: Any, folder: Path, limit: int, kind: str) -> bytes:
    """The bytes of a file by its path inside `folder`, in base64, or as they are. Raises Corrupt."""
    if isinstance(reference, Mapping):  # as data sets have it in parquet: bytes, or a path
        named = [reference[key] for key in ("bytes", "base64", "path") if reference.get(key) is not None]
        if not named:
            raise Corrupt(f"{_a(kind)} must be a path, base64 or bytes, is {shown(dict(reference))}")
        coded = reference.get("bytes") is None and reference.get("base64") is not None
        reference = f"data:{kind}/any;base64,{named[0]}" if coded else named[0]
    if isinstance(reference, str) and (prefix := _DATA.match(reference)):
        try:
            reference = base64.b64decode(reference[prefix.end() :], validate=True)
        except ValueError as error:
            raise Corrupt(f"{_a(kind)} is not in base64: {error}") from error
    if isinstance(reference, str):
        return _of_file(reference, folder, limit, kind)
    if not isinstance(reference, bytes):
        raise Corrupt(f"{_a(kind)} must be a path, base64 or bytes, is {shown(reference)}")
    if len(reference) > limit:
        raise Corrupt(f"{_a(kind)} of {len(reference)} bytes exceeds data.{kind}s.limit_bytes")
    return reference


def _of_file(name: str, folder: Path, limit: int, kind: str) -> bytes:
    if _URL.match(name):
        raise Corrupt(f"{kind} {shown(name)} is a URL: only files beside the rows are read; download it")
    try:
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise Corrupt(f"{kind} {shown(name)} is outside of the folder that its row lies in")
        return files.content(path, limit)
    except (OSError, ValueError, RuntimeError) as error:  # the latter of links that go round
        why = getattr(error, "strerror", None) or error
        raise Corrupt(f"{kind} {shown(name)}: {why}") from error
