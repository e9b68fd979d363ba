"""Rows with videos as transformers' own processors make inputs of them, which are kept in clips.json.

python -m tests.vision.clips writes that file; it needs torchvision, without which transformers processes no
videos.
"""

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bundle.recipe import Recipe, from_mapping, load
from tests.vision import rows
from tests.vision.cases import CASES
from tests.vision.rows import asking, clip, content, image

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
KEPT = Path(__file__).with_suffix(".json")
TOKENS = {"image_token_id": 259, "video_token_id": 261}
TOKENS |= {"vision_start_token_id": 258, "vision_end_token_id": 260}
OF_IMAGES: dict[str, Any] = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
OF_VIDEOS: dict[str, Any] = {**OF_IMAGES, "size": {"shortest_edge": 300, "longest_edge": 3000}, "fps": 4}
OF_VIDEOS |= {"min_frames": 2, "max_frames": 6, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
OF_IMAGES |= {"min_pixels": 256, "max_pixels": 1024, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
STILL = image(16, 24)
# Height, width and frames: of lists, which have an fps, and of animated files of ten frames a second.
LISTS = {"list of 5": (20, 28, 5), "list of 2": (9, 40, 2), "wide list of 5": (16, 40, 5)}
RATES = {"list of 5": 1.5, "list of 2": 2.0, "wide list of 5": 1.0}
FILES = {"file of 11": (33, 21, 11), "file of 4": (4, 15, 4), "file of 30": (16, 16, 30)}
EVERY = (*LISTS, *FILES)
_LONGEST = 512
_STEP = 61  # every so many numbers of the patches are kept


def frames(name: str) -> list[Any]:
    """The pictures of a video."""
    height, width, count = (LISTS | FILES)[name]
    return [image(height, width, seed=number) for number in range(count)]


def row(name: str) -> dict[str, Any]:
    """A row with text, an image and a video, whose files are in `written`."""
    video: dict[str, Any] = {"type": "video", "video": f"images/{name}.webp"}
    if name in LISTS:
        video["video"] = [f"images/{name} {number}.png" for number in range(LISTS[name][2])]
        video["fps"] = RATES[name]
    said = [{"type": "text", "text": "look:"}, video, {"type": "text", "text": "and"}]
    return asking([*said, {"type": "image", "image": "images/still.png"}], "two")


def written(directory: Path, names: tuple[str, ...] = EVERY) -> Path:
    """A folder with the rows, their files, and a tokenizer with both processors' settings."""
    files = {"images/still.png": content(STILL)}
    for name in names:
        shown = frames(name)
        if name in FILES:
            files[f"images/{name}.webp"] = clip(shown)
        else:
            files |= {f"images/{name} {number}.png": content(of) for number, of in enumerate(shown)}
    rows.write(directory, [row(name) for name in names], files)
    settings = {"preprocessor_config": OF_IMAGES, "video_preprocessor_config": OF_VIDEOS}
    for name, said in settings.items():
        (directory / "tokenizer" / f"{name}.json").write_text(json.dumps(said))
    return directory


def config(family: str) -> dict[str, Any]:
    """A model of a family for the tokenizer of the digits."""
    found = next(case.config for case in CASES if case.family == family)
    text = {"vocab_size": 264, "max_position_embeddings": _LONGEST}
    nested = {"text_config": found["text_config"] | text} if "text_config" in found else text
    return found | nested | TOKENS


def job(directory: Path, family: str, *more: str) -> Recipe:
    """What reads them."""
    longest = [f"model.config.max_position_embeddings={_LONGEST}", f"data.sequence_length={_LONGEST}"]
    known = ["data.images={}", *longest, *more]
    given = load(str(rows.RECIPE), rows.overrides(directory, *known)).dump()
    return from_mapping(given | {"model": {"config": config(family)}})


def kept(family: str, name: str, directory: Path) -> dict[str, Any]:
    """What transformers' processor makes of a row, as far as it is kept."""
    from transformers import AutoTokenizer
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    deep = family != "qwen2_5_vl"
    tokenizer: Any = AutoTokenizer.from_pretrained(str(directory / "tokenizer"))
    of_videos: Any = Qwen3VLVideoProcessor if deep else Qwen2VLVideoProcessor
    whole: Any = Qwen3VLProcessor if deep else Qwen2_5_VLProcessor
    processor = whole(Qwen2VLImageProcessorPil(**OF_IMAGES), tokenizer, of_videos(**OF_VIDEOS))
    shown = np.stack([np.asarray(frame) for frame in frames(name)])
    rate = RATES.get(name, 10.0)
    known = {"total_num_frames": len(shown), "fps": rate, "frames_indices": list(range(len(shown)))}
    text = tokenizer.apply_chat_template(row(name)["messages"], tokenize=False)
    if (
        deep
    ):  # transformers 4 takes the tokens around a video away with it, as the model was trained; 5 does not
        text = text.replace("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>")
    made = processor(
        text=[text], images=[STILL], videos=[shown], video_metadata=[known],
        do_sample_frames=name in FILES, return_tensors="pt",
    )  # fmt: skip
    (ids,) = made["input_ids"].tolist()
    pixels = torch.cat([made["pixel_values_videos"], made["pixel_values"]])
    grids = torch.cat([made["video_grid_thw"], made["image_grid_thw"]]).tolist()
    seconds = float(made["second_per_grid_ts"][0]) if "second_per_grid_ts" in made else None
    return {"ids": ids, "grids": grids, "seconds": seconds, **numbers(pixels)}


def numbers(pixels: torch.Tensor) -> dict[str, Any]:
    """What is kept of patches."""
    some = pixels.flatten()[::_STEP].double()
    return {"patches": list(pixels.shape), "some": [round(value, 6) for value in some.tolist()]}


def every(directory: Path) -> dict[str, Any]:
    """All that is kept."""
    written(directory)
    found = {f"{of}, {name}": kept(of, name, directory) for of, name in product(FAMILIES[:2], EVERY)}
    return found | {"defaults": defaults()}


def defaults() -> dict[str, Any]:
    """What transformers' classes of video processors have where no file says anything."""
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    found = {}
    for family, kind in zip(FAMILIES, (Qwen2VLVideoProcessor, Qwen3VLVideoProcessor), strict=False):
        of: Any = kind()
        pixels = [of.size["shortest_edge"], of.size["longest_edge"]]
        found[family] = [*pixels, of.min_frames, of.max_frames, list(of.image_mean), list(of.image_std)]
    return found


def main() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        found = every(Path(folder, "clips"))
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
    KEPT.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
