"""Rows with images and videos, a tokenizer of bytes with their tokens, and a job that reads them."""

import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "launch" / "demo" / "digits.yaml"
_SPEC = importlib.util.spec_from_file_location("digits", RECIPE.with_suffix(".py"))
assert _SPEC is not None and _SPEC.loader is not None
digits: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(digits)


def image(height: int, width: int, seed: int = 1, mode: str = "RGB") -> Image.Image:
    """One of random colours."""
    channels = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)
    return Image.fromarray(values.squeeze(-1) if channels == 1 else values, mode)


def content(of: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """What a file of it holds."""
    file = io.BytesIO()
    of.save(file, kind, **options)
    return file.getvalue()


def clip(frames: list[Image.Image], kind: str = "WEBP", milliseconds: int = 100) -> bytes:
    """What an animated file of them holds; of WEBP and PNG without loss."""
    options: dict[str, Any] = {"append_images": frames[1:], "duration": milliseconds, "lossless": True}
    return content(frames[0], kind, save_all=True, **options)


def film(frames: list[Image.Image], fps: int, kind: str = "matroska") -> bytes:
    """What a film of them holds, without loss."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream("libx264rgb", rate=fps, options={"qp": "0"})
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "rgb24"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame).reformat(format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()


def asking(question: Any, answer: Any = "yes", **row: Any) -> dict[str, Any]:
    """A row of one question and its answer."""
    said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": said, **row}


def write(directory: Path, rows: list[dict[str, Any]], images: dict[str, bytes]) -> Path:
    """A folder with rows.jsonl, its images and a tokenizer."""
    (directory / "images").mkdir(parents=True)
    for name, values in images.items():
        (directory / name).write_bytes(values)
    (directory / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    digits.write_tokenizer(directory / "tokenizer")
    return directory


def overrides(directory: Path, *more: str) -> list[str]:
    """The recipe of the digits for the rows of a folder."""
    return [
        f"data.path=[{directory / 'rows.jsonl'}]",
        f"data.tokenizer=hf:{directory / 'tokenizer'}",
        "data.validation_sets={}",
        *more,
    ]
