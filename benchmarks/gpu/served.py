"""Whether SGLang opens what was exported, and answers as transformers does.

python -m benchmarks.gpu.served DIRECTORY [--against DIRECTORY] [--images FILE...]

Needs a GPU with sglang and transformers beside torch. Greedy answers in bf16 to four prompts of 17 to 400
tokens, or to a question about each image. transformers holds the weights of DIRECTORY, or those that
`--against` names: of an export in FP8, the same run's in bf16. Ends with 1 where SGLang takes a token that
transformers holds `NATS` less likely than its best one (equal answers cannot be asked for: bf16 decides near
ties by the order of sums), or says another log-probability of it, by more than `NATS`.

With SGLANG_ENABLE_JIT_DEEPGEMM=0 in the environment, an FP8 export is opened without compiling for minutes.
"""

import argparse
import random
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

NATS = 0.1
LENGTHS = (17, 64, 200, 400)
NEW = 32
ASKED = "What is to be seen here?"


class Question(NamedTuple):
    """What is asked: how it is called, what SGLang is given of it, and what transformers is."""

    label: str
    given: dict[str, Any]
    inputs: dict[str, torch.Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory")
    parser.add_argument("--against", metavar="DIRECTORY")
    parser.add_argument("--images", nargs="+", default=[], metavar="FILE")
    told = parser.parse_args()
    import sglang
    import transformers

    kind = transformers.AutoModelForImageTextToText if told.images else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(told.against or told.directory, dtype=torch.bfloat16).cuda().eval()
    engine = sglang.Engine(
        model_path=told.directory,
        skip_tokenizer_init=not told.images,
        log_level="warning",
        disable_radix_cache=True,
        disable_cuda_graph=True,
        sampling_backend="pytorch",
        mem_fraction_static=0.3,
        dtype="bfloat16",
    )
    asked = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    questions = shown(told.directory, told.images) if told.images else written(model.config.vocab_size)
    failed = False
    for label, given, inputs in questions:
        one = engine.generate(**given, sampling_params=asked, return_logprob=True)
        said, chosen, _ = zip(*one["meta_info"]["output_token_logprobs"], strict=True)
        behind, off, equal = compared(model, inputs, chosen, said)
        failed |= max(behind, off) > NATS
        print(
            f"{label}: {equal} of {NEW} tokens are transformers' best, no other more than"
            f" {behind:.4f} nats behind it; log-probabilities within {off:.4f}",
            flush=True,
        )
    engine.shutdown()
    return int(failed)


def written(vocabulary: int) -> Iterator[Question]:
    """Prompts of random tokens, `LENGTHS` long."""
    numbers = random.Random(1)
    for length in LENGTHS:
        prompt = [numbers.randrange(vocabulary) for _ in range(length)]
        yield Question(
            f"prompt of {length}", {"input_ids": prompt}, {"input_ids": torch.tensor([prompt], device="cuda")}
        )


def shown(directory: str, images: list[str]) -> Iterator[Question]:
    """`ASKED` about each image, by the template and the processor of `directory`."""
    from PIL import Image
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(directory)
    parts = [{"type": "image"}, {"type": "text", "text": ASKED}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
    )
    for path in images:
        with Image.open(path) as image:
            inputs = processor(text=[text], images=[image.convert("RGB")], return_tensors="pt").to("cuda")
        yield Question(path, {"prompt": text, "image_data": [path]}, dict(inputs))


@torch.no_grad()
def compared(
    model: torch.nn.Module, inputs: dict[str, torch.Tensor], chosen: tuple[int, ...], said: tuple[float, ...]
) -> tuple[float, float, int]:
    """Nats that the chosen tokens are behind the best at most, how far off `said` is, how many are best."""
    prompt = inputs["input_ids"]
    answer = torch.tensor([chosen], device=prompt.device)
    inputs = inputs | {"input_ids": torch.cat([prompt, answer], -1)}
    inputs.pop("attention_mask", None)  # of the prompt alone, and nothing is masked
    if (kinds := inputs.get("mm_token_type_ids")) is not None:
        inputs["mm_token_type_ids"] = torch.cat([kinds, torch.zeros_like(answer)], -1)
    scores = model(**inputs).logits[0, prompt.shape[-1] - 1 : -1].float().log_softmax(-1)
    own = scores.gather(-1, answer.T)[:, 0]
    behind = scores.max(-1).values - own
    off = (torch.tensor(said, device=own.device) - own).abs().max()
    return float(behind.max()), float(off), int((behind == 0).sum())


if __name__ == "__main__":
    sys.exit(main())
