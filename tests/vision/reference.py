"""What transformers computes with a model of random weights that sees images: weights, numbers, gradients."""

import copy
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.vision.cases import END, IMAGE, START, Case

NUMBERS, GRADIENTS = "numbers.safetensors", "gradients"
TEXT_TOKENS = 180
# A sequence: so many tokens of text, or the patches of an image in height and width. Both are equally long.
FIRST: tuple[int | tuple[int, int], ...] = (3, (4, 6), 5, (8, 4), (2, 2), 7)
SECOND: tuple[int | tuple[int, int], ...] = (7, (6, 6), 18)
KEPT = 23  # tokens of the second one that are learned, and all that a pack has of it


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
        ids, grids = _sequence(pieces)
        values = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
        pixels = torch.randn(int(grids.prod(1).sum()), values)
        given = (ids[:-1] == IMAGE).int()[None]
        seen = model(ids[None, :-1], pixel_values=pixels, image_grid_thw=grids, mm_token_type_ids=given)
        every = seen.logits[0].double().log_softmax(-1)
        log_p = every.gather(-1, ids[1:, None]).squeeze(-1)
        numbers[f"{name} entropies"] = -(every.exp() * every).sum(-1).detach()
        losses.append(-log_p[: KEPT if name == "second" else None])
        numbers |= {f"{name} ids": ids, f"{name} grids": grids, f"{name} pixels": pixels}
        numbers[f"{name} log-probs"] = log_p.detach()
    loss = torch.cat(losses).mean()
    loss.backward()
    numbers["loss"] = loss.detach()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    model.save_pretrained(directory / GRADIENTS)
    save_file({name: value.contiguous() for name, value in numbers.items()}, directory / NUMBERS)


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
    ids, grids, pixels = (numbers[f"first {what}"] for what in ("ids", "grids", "pixels"))
    with torch.no_grad():
        given = (ids[:-1] == IMAGE).int()[None]
        seen = model.eval()(
            ids[None, :-1], pixel_values=pixels, image_grid_thw=grids, mm_token_type_ids=given
        )
    wrong = {
        str(each) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for each in report[kind]
    }
    return wrong, seen.logits[0].double().log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)


def positions(case: Case, ids: Tensor, grids: Tensor) -> Tensor:
    """transformers' own positions [tokens, 3]."""
    from transformers import AutoModelForImageTextToText

    kind: Any = AutoModelForImageTextToText
    with torch.device("meta"):
        model = kind.from_config(_config(case))
    found, _ = model.model.get_rope_index(ids[None], (ids == IMAGE).int()[None], image_grid_thw=grids)
    positions: Tensor = found[:, 0].T
    return positions


def _config(case: Case) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**copy.deepcopy(dict(case.config)))  # it writes into what it is given


def _sequence(pieces: tuple[int | tuple[int, int], ...]) -> tuple[Tensor, Tensor]:
    """Token ids, one more than are predicted, and the grids of the images among them."""
    ids: list[int] = []
    grids = []
    for piece in pieces:
        if isinstance(piece, int):
            ids += torch.randint(0, TEXT_TOKENS, (piece,)).tolist()
        else:
            height, width = piece
            ids += [START, *[IMAGE] * (height * width // 4), END]
            grids.append((1, height, width))
    return torch.tensor([*ids, 7]), torch.tensor(grids)
