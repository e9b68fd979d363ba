"""What transformers computes with a model of random weights that sees images: weights, numbers, gradients."""

import copy
import zlib
from itertools import cycle, groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.vision.cases import END, IMAGE, START, VIDEO, Case

NUMBERS, GRADIENTS = "numbers.safetensors", "gradients"
TEXT_TOKENS = 180
Pieces = tuple[int | tuple[int, ...], ...]
# A sequence: so many tokens of text, or the patches of an image in height and width, or those of a video in
# time, too. Text fills both up to one length.
FIRST: Pieces = (3, (4, 6), 5, (3, 4, 4), (8, 4), (2, 2))
SECOND: Pieces = (7, (6, 6), 2, (2, 2, 4), 1, (2, 4, 2))
LENGTH = 56
SECONDS = (0.9, 0.7, 1.4)  # from one patch of a video to the next, in turns
KEPT = 47  # tokens of the second one that are learned, and all that a pack has of it


def write(case: Case, directory: Path) -> None:
    """Writes the weights as transformers saves them; beside them the sequences, their log-probs, and the
    gradient of their loss as if it were a model."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(zlib.crc32(case.name.encode()))
    kind: Any = AutoModelForImageTextToText
    model = kind.from_config(_config(case), attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            matrix = parameter.ndim > 1
            parameter.copy_(torch.randn(parameter.shape) * (0.2 if matrix else 0.3) + (not matrix))
    model.save_pretrained(directory, max_shard_size="5GB" if model.config.tie_word_embeddings else "60KB")
    tower = model.config.vision_config
    numbers: dict[str, Tensor] = {}
    losses = []
    for name, pieces in (("first", FIRST), ("second", SECOND)):
        ids, grids, seconds = _sequence(pieces, case)
        values = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
        pixels = torch.randn(int(grids.prod(1).sum()), values)
        numbers |= {f"{name} ids": ids, f"{name} grids": grids, f"{name} seconds": seconds}
        numbers |= {f"{name} pixels": pixels, f"{name} positions": positions(model, ids, grids, seconds)}
        seen = model(**inputs(numbers, name))
        every = seen.logits[0].double().log_softmax(-1)
        log_p = every.gather(-1, ids[1:, None]).squeeze(-1)
        numbers[f"{name} entropies"] = -(every.exp() * every).sum(-1).detach()
        losses.append(-log_p[: KEPT if name == "second" else None])
        numbers[f"{name} log-probs"] = log_p.detach()
    loss = torch.cat(losses).mean()
    loss.backward()
    numbers["loss"] = loss.detach()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    model.save_pretrained(directory / GRADIENTS)
    save_file({name: value.contiguous() for name, value in numbers.items()}, directory / NUMBERS)


def inputs(numbers: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """What transformers' model takes of a sequence."""
    ids, grids, seconds, pixels = (numbers[f"{name} {of}"] for of in ("ids", "grids", "seconds", "pixels"))
    moving, each = seconds > 0, pixels.split(grids.prod(1).tolist())
    images, videos = (
        [of for of, is_video in zip(each, moving, strict=True) if is_video == wanted]
        for wanted in (False, True)
    )
    return {
        "input_ids": ids[None, :-1],
        "position_ids": numbers[f"{name} positions"][:-1].T[:, None],
        "mm_token_type_ids": kinds(ids[:-1])[None],
        "pixel_values": torch.cat(images),
        "image_grid_thw": grids[~moving],
        "pixel_values_videos": torch.cat(videos),
        "video_grid_thw": grids[moving],
        "second_per_grid_ts": seconds[moving].float(),
    }


def kinds(ids: Tensor) -> Tensor:
    """1 where an image stands, 2 where a video does."""
    return (ids == IMAGE).int() + 2 * (ids == VIDEO).int()


def read(directory: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights, numbers) that `write` has left."""
    return tensors(directory), load_file(directory / NUMBERS)


def tensors(directory: Path) -> dict[str, Tensor]:
    """All that the safetensors of a model hold."""
    files = [load_file(path) for path in directory.glob("model*.safetensors")]
    return {name: value for of in files for name, value in of.items()}


def as_published(written: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    """What transformers 5 has written, with experts as they are on the Hub: [expert, in, out]."""
    if "moe" not in case.family:
        return written
    return {name: of.mT if ".mlp.experts." in name else of for name, of in written.items()}


def opened(case: Case, directory: Path, numbers: dict[str, Tensor]) -> tuple[set[str], Tensor]:
    """What transformers misses or cannot use in a directory, and log-probs of the first sequence there."""
    from transformers import AutoModelForImageTextToText

    kind: Any = AutoModelForImageTextToText
    model, report = kind.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    ids = numbers["first ids"]
    with torch.no_grad():
        seen = model.eval()(**inputs(numbers, "first"))
    wrong = {
        str(each) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for each in report[kind]
    }
    return wrong, seen.logits[0].double().log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)


def built(case: Case) -> Any:
    """transformers' model without values."""
    from transformers import AutoModelForImageTextToText

    kind: Any = AutoModelForImageTextToText
    with torch.device("meta"):
        return kind.from_config(_config(case))


def positions(model: Any, ids: Tensor, grids: Tensor, seconds: Tensor) -> Tensor:
    """transformers' own positions [tokens, 3], behind a video moved on where its time is the largest of them.

    As transformers 4 has it, and the models were trained; 5.23 goes on behind height and width.
    """
    moving = seconds > 0
    found, _ = model.model.get_rope_index(
        ids[None],
        kinds(ids)[None],
        image_grid_thw=grids[~moving],
        video_grid_thw=grids[moving],
        second_per_grid_ts=seconds[moving].float(),
    )
    positions: Tensor = found[:, 0].T
    for seen, group in groupby(range(len(ids)), (kinds(ids) > 0).tolist().__getitem__):
        places = list(group)
        if seen:
            own = positions[places]
            positions[places[-1] + 1 :] += own.max() - own[:, 1:].max()
    return positions


def tower(case: Case) -> Any:
    """transformers' vision tower of a case, with random weights."""
    from transformers import AutoModel

    kind: Any = AutoModel
    return kind.from_config(_config(case), attn_implementation="eager", dtype=torch.float32).visual


def _config(case: Case) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**copy.deepcopy(dict(case.config)))  # it writes into what it is given


def _sequence(pieces: Pieces, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, one more than are predicted, and the grids and seconds of what is seen among them."""
    ids: list[int] = []
    grids, seconds, turns = [], [], cycle(SECONDS)
    for piece in pieces:
        if isinstance(piece, int):
            ids += torch.randint(0, TEXT_TOKENS, (piece,)).tolist()
            continue
        *times, height, width = piece
        grids.append((*(times or [1]), height, width))
        seconds.append(next(turns) if times else 0.0)
        frames, token = [height * width // 4] * grids[-1][0], VIDEO if times else IMAGE
        if not case.vision.has_frame_timestamps:
            frames = [sum(frames)]
        for tokens in frames:  # between those that stand apart is what a time would be
            text = torch.randint(0, TEXT_TOKENS, (len(frames) - 1,)).tolist()
            ids += [*text, START, *[token] * tokens, END]
    ids += torch.randint(0, TEXT_TOKENS, (LENGTH - len(ids),)).tolist()
    return torch.tensor([*ids, 7]), torch.tensor(grids), torch.tensor(seconds, dtype=torch.float64)
