"""Whether SGLang opens what was exported, and answers as transformers does.

python -m benchmarks.gpu.served DIRECTORY

Needs a GPU with sglang and transformers beside torch. Greedy answers in bf16 to four prompts of 17 to 400
tokens. Ends with 1 where SGLang takes a token that transformers holds `NATS` less likely than its best one
(equal answers cannot be asked for: bf16 decides near ties by the order of sums), or says another
log-probability of it, by more than `NATS`.
"""

import argparse
import random
import sys

import torch

NATS = 0.1
LENGTHS = (17, 64, 200, 400)
NEW = 32


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory")
    path = parser.parse_args().directory
    import sglang
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).cuda().eval()
    numbers = random.Random(1)
    prompts = [[numbers.randrange(model.config.vocab_size) for _ in range(n)] for n in LENGTHS]
    engine = sglang.Engine(
        model_path=path,
        skip_tokenizer_init=True,
        log_level="warning",
        disable_radix_cache=True,
        disable_cuda_graph=True,
        sampling_backend="pytorch",
        mem_fraction_static=0.3,
        dtype="bfloat16",
    )
    asked = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    given = engine.generate(input_ids=prompts, sampling_params=asked, return_logprob=True)
    failed = False
    for prompt, one in zip(prompts, given, strict=True):
        chosen, said = one["output_ids"], [each[0] for each in one["meta_info"]["output_token_logprobs"]]
        behind, off, equal = compared(model, prompt, chosen, said)
        failed |= max(behind, off) > NATS
        print(
            f"prompt of {len(prompt)}: {equal} of {NEW} tokens are transformers' best, no other more than"
            f" {behind:.4f} nats behind it; log-probabilities within {off:.4f}",
            flush=True,
        )
    engine.shutdown()
    return int(failed)


@torch.no_grad()
def compared(
    model: torch.nn.Module, prompt: list[int], chosen: list[int], said: list[float]
) -> tuple[float, float, int]:
    """Nats that the chosen tokens are behind the best at most, how far off `said` is, how many are best."""
    ids = torch.tensor([prompt + chosen], device="cuda")
    scores = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    own = scores.gather(-1, torch.tensor(chosen, device="cuda")[:, None])[:, 0]
    behind = scores.max(-1).values - own
    off = (torch.tensor(said, device="cuda") - own).abs().max()
    return float(behind.max()), float(off), int((behind == 0).sum())


if __name__ == "__main__":
    sys.exit(main())
