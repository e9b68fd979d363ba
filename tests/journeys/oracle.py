"""What transformers says of rows: losses and log-probabilities of answers. Nothing of ours is called."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import logsigmoid


def _log_probs(model: Any, ids: list[int], prompt: int, more: dict[str, Any]) -> torch.Tensor:
    """Return the log-probabilities of all tokens behind the prompt, in float64."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), **more).logits[0].double()
    labels = torch.tensor(ids[1:])[:, None]
    return logits[:-1].log_softmax(-1).gather(-1, labels)[prompt - 1 :, 0]


def _load(place: Path) -> tuple[Any, Any]:
    import transformers

    config = json.loads((place / "config.json").read_text())
    kind: Any = transformers.AutoModelForCausalLM
    if "vision_config" in config:
        kind = transformers.AutoModelForImageTextToText
    model = kind.from_pretrained(place, dtype=torch.float32, attn_implementation="eager").eval()
    return model, transformers.AutoTokenizer.from_pretrained(place)


def _ids(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[list[int], int]:
    """Return the ids of a conversation and the number of those before its last answer."""
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    assert whole.startswith(prompt)
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    ids, given = encode(whole), encode(prompt)
    assert ids[: len(given)] == given
    return ids, len(given)


def sft_loss(place: Path, rows: list[dict[str, Any]], folder: Path) -> float:
    """Return the mean over all tokens of all answers, in nats; images are paths in `folder`."""
    model, tokenizer = _load(place)
    found = [_answer(model, tokenizer, row, folder) for row in rows]
    return -float(torch.cat(found).mean())


def _answer(model: Any, tokenizer: Any, row: dict[str, Any], folder: Path) -> torch.Tensor:
    if not row.get("images"):
        return _log_probs(model, *_ids(tokenizer, row["messages"]), {})
    (name,) = row["images"]
    question, answer = row["messages"]
    text = question["content"].removeprefix("<image>")
    parts = [{"type": "image"}, {"type": "text", "text": text}]
    ids, given = _ids(tokenizer, [{"role": "user", "content": parts}, answer])
    pixels, grid = _patches(Image.open(folder / name).convert("RGB"))
    pad = model.config.image_token_id
    many = int(grid.prod()) // model.config.vision_config.spatial_merge_size**2
    at = ids.index(pad)
    ids[at : at + 1] = [pad] * many
    kinds = (torch.tensor([ids]) == pad).int()
    more = {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": kinds}
    return _log_probs(model, ids, given + many - 1, more)


def _patches(image: Image.Image) -> tuple[torch.Tensor, torch.Tensor]:
    """Return patches of 4 x 4 pixels in blocks of 2 x 2 patches, and their grid, of one image."""
    values = (np.asarray(image, np.float32) / 255 - 0.5) / 0.5
    high, wide = (size // 4 for size in values.shape[:2])
    blocks = values.reshape(high // 2, 2, 4, wide // 2, 2, 4, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    return torch.from_numpy(blocks.reshape(high * wide, -1).copy()), torch.tensor([[1, high, wide]])


def dpo_loss(place: Path, reference: Path, rows: list[dict[str, Any]], beta: float = 0.1) -> float:
    """Return the mean of the sigmoid loss over pairs."""
    scores = [list(_scores(model, rows)) for model in (place, reference)]
    margins = [of[0] - of[1] for of in np.asarray(scores[0]) - np.asarray(scores[1])]
    return -float(logsigmoid(beta * torch.tensor(margins)).mean())


def _scores(place: Path, rows: list[dict[str, Any]]) -> Iterator[tuple[float, float]]:
    """Yield the log-probability of each chosen and each rejected answer."""
    model, tokenizer = _load(place)
    for row in rows:
        question = {"role": "user", "content": row["prompt"]}
        each = [[question, {"role": "assistant", "content": row[key]}] for key in ("chosen", "rejected")]
        chosen, rejected = (
            float(_log_probs(model, *_ids(tokenizer, messages), {}).sum()) for messages in each
        )
        yield chosen, rejected
