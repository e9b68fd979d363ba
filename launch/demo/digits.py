"""The digits of scikit-learn as conversations about an image, and how many a trained model reads right.

    pip install scikit-learn
    python launch/demo/digits.py make digits
    mcore-bundle train launch/demo/digits.yaml
    python launch/demo/digits.py score digits runs/digits/hf

`make` writes the images, the rows (train.jsonl, held_out.jsonl) and a tokenizer of bytes; `score` has
transformers answer about the images held out, with the model that was exported, and prints the accuracy.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

QUESTION = "which digit is this?"
HELD_OUT, SEED, SIZE = 300, 1, 16  # of 1797 images; an image of 8 x 8 is shown twice as large
_SEEN = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
SPECIAL = ("<|im_start|>", "<|im_end|>", *_SEEN)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROCESSING = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "temporal_patch_size": 1,
    "merge_size": 2,
    "min_pixels": SIZE**2,
    "max_pixels": SIZE**2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def make(directory: Path) -> None:
    """Writes the images, the rows and the tokenizer."""
    from PIL import Image
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    (directory / "images").mkdir(parents=True, exist_ok=True)
    rows = []
    for number, (values, digit) in enumerate(zip(pixels, digits, strict=True)):
        name = f"images/{number}.png"
        image = Image.fromarray((values.reshape(8, 8) * 255 / 16).astype("uint8"))
        image.resize((SIZE, SIZE), Image.Resampling.NEAREST).save(directory / name)
        said = [
            {"role": "user", "content": f"<image>{QUESTION}"},
            {"role": "assistant", "content": str(digit)},
        ]
        rows.append(json.dumps({"images": [name], "messages": said}))
    random.Random(SEED).shuffle(rows)
    for file, part in (("held_out.jsonl", rows[:HELD_OUT]), ("train.jsonl", rows[HELD_OUT:])):
        (directory / file).write_text("\n".join(part) + "\n", encoding="utf-8")
    write_tokenizer(directory / "tokenizer")


def write_tokenizer(directory: Path) -> None:
    """One of bytes and a few special tokens, of 262 ids, and how images are processed."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    of_bytes = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    of_bytes.decoder = decoders.ByteLevel()
    of_bytes.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    # A server that is given an image asks for a token to pad with.
    made = PreTrainedTokenizerFast(tokenizer_object=of_bytes, eos_token="<|im_end|>", pad_token="<|im_end|>")
    made.chat_template = TEMPLATE
    made.save_pretrained(str(directory))
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSING, indent=2), encoding="utf-8")


def score(directory: Path, export: Path) -> float:
    """The share of the digits held out that the exported model names."""
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoTokenizer, __version__

    at_least_5 = int(__version__.partition(".")[0]) >= 5
    kind: Any = AutoModelForImageTextToText
    model = kind.from_pretrained(export, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(directory / "tokenizer"))
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    rows = [json.loads(line) for line in (directory / "held_out.jsonl").read_text().splitlines()]
    parts = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    said = [{"role": "user", "content": parts}]
    prompt = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ids = [token for each in ids for token in ([pad] * 4 if each == pad else [each])]
    shown = torch.tensor([ids] * len(rows))
    pixels, grids = _patches([Image.open(directory / row["images"][0]).convert("RGB") for row in rows])
    with torch.no_grad():
        # transformers 5 wants to be told which tokens are images'
        kinds = {"mm_token_type_ids": (shown == pad).int()} if at_least_5 else {}
        seen = model(shown, pixel_values=pixels, image_grid_thw=grids, **kinds).logits[:, -1]
    answers = [tokenizer.decode([token]) for token in seen.argmax(-1).tolist()]
    right = sum(answer == row["messages"][1]["content"] for answer, row in zip(answers, rows, strict=True))
    return right / len(rows)


def _patches(images: Any) -> Any:
    """The images' patches and grids, by transformers."""
    try:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil as kind,
        )
    except ImportError:  # before transformers 5
        from transformers import Qwen2VLImageProcessor as kind
    known = {name: value for name, value in PROCESSING.items() if name != "image_processor_type"}
    made = kind(**known)(images=images, return_tensors="pt")
    return made["pixel_values"], made["image_grid_thw"]


def main() -> None:
    verb, *places = sys.argv[1:]
    if verb == "make":
        make(Path(places[0]))
    elif verb == "score":
        print(f"accuracy {score(Path(places[0]), Path(places[1])):.3f} of {HELD_OUT} held out")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
