"""Rows with images, a tokenizer of bytes with their tokens, and the settings of a job that reads them."""

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
