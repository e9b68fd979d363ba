"""Positions of sequences with videos as Qwen2.5-VL was published with them, which are kept in positions.json.

python -m tests.vision.positions writes that file; it needs a transformers that computes them so, in a folder
of its own:

    pip install --target FOLDER --no-deps transformers==4.49.0 tokenizers==0.21.4 huggingface-hub==0.36.2
    PYTHONPATH=FOLDER:. python -m tests.vision.positions

4.49.0 is the first that has the family. 4.57.6 gives the same where seconds are whole numbers, to which it
cuts them; 5.23.0 goes on behind a video as if that had no time.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.vision.cases import END, IMAGE, START, VIDEO

KEPT = Path(__file__).with_suffix(".json")
TOKENS_PER_SECOND = 2  # as in the published configs
MERGED = 2
Piece = tuple[int] | tuple[int, int] | tuple[int, int, int, float]
# (tokens of text), (an image's patches in height and width), (a video's in time, height and width, and the
# seconds from one in time to the next).
SEQUENCES: tuple[tuple[Piece, ...], ...] = (
    ((2,), (20, 4, 4, 1.0), (4,)),
    ((1,), (3, 12, 4, 1.0), (3,)),
    ((1,), (3, 4, 12, 1.0), (2,)),
    ((2,), (6, 4, 6, 2.0), (1,), (8, 4), (3,), (4, 4, 4, 3.0), (2,)),
    ((1,), (12, 2, 2, 0.55), (5,)),
    ((1,), (9, 4, 4, 0.083), (2,), (5, 2, 4, 1.35), (3,)),
    ((4,), (2, 6, 4, 7.25), (2, 6), (7, 4, 2, 0.7), (1,)),
    ((1,), (1, 4, 4, 4.0), (2,), (4, 4), (3,)),
    ((1,), (4, 8, 8, 0.5), (2,)),
    ((1,), (4, 8, 8, 0.75), (2,)),
)


def laid_out(
    pieces: Iterable[Piece], apart: bool = False
) -> tuple[list[int], list[tuple[int, ...]], list[float]]:
    """Token ids of a sequence, and the grids and seconds of what it shows; 0 seconds of an image.

    Where frames stand `apart`, there is text between those of a video.
    """
    ids: list[int] = [7]
    grids: list[tuple[int, ...]] = []
    seconds: list[float] = []
    for piece in pieces:
        if len(piece) == 1:
            ids += [5] * piece[0]
            continue
        times, height, width, pace = piece if len(piece) == 4 else (1, *piece, 0.0)
        token, tokens = (VIDEO if pace else IMAGE), height * width // MERGED**2
        for each in [tokens] * times if apart else [times * tokens]:
            ids += [6, START, *[token] * each, END]
        grids.append((times, height, width))
        seconds.append(pace)
    return ids, grids, seconds


def computed(pieces: tuple[Piece, ...]) -> list[list[int]]:
    """The positions [3][tokens] by transformers."""
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as modeling

    known: Any = modeling
    tower = SimpleNamespace(spatial_merge_size=MERGED, tokens_per_second=TOKENS_PER_SECOND)
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
    model = SimpleNamespace(config=SimpleNamespace(vision_config=tower, **tokens))
    kind = known.Qwen2_5_VLModel
    if not hasattr(kind, "get_rope_index"):
        kind = known.Qwen2_5_VLForConditionalGeneration
    ids, grids, seconds = laid_out(pieces)
    each = list(zip(grids, seconds, strict=True))
    images, videos = (torch.tensor([of for of, pace in each if bool(pace) == moving]) for moving in (0, 1))
    found, _ = kind.get_rope_index(
        model, torch.tensor([ids]), images, videos, torch.tensor([pace for pace in seconds if pace])
    )
    positions: list[list[int]] = found[:, 0].tolist()
    return positions


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(computed(pieces)) for pieces in SEQUENCES)
    KEPT.write_text(f"[\n{lines}\n]\n")
