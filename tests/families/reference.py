"""What transformers computes with a model of random weights: the weights, and the numbers of one sequence."""

import copy
import zlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.families.cases import LENGTH, Case

NUMBERS = "numbers.safetensors"


def write(case: Case, directory: Path) -> None:
    """Writes the weights as transformers saves them, and beside them tokens, log-probs, entropies, loss."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(zlib.crc32(case.name.encode()))
    config = AutoConfig.for_model(**copy.deepcopy(dict(case.config)))  # it writes into what it is given
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("inv_freq"):
                continue
            matrix = parameter.ndim > 1
            parameter.copy_(torch.randn(parameter.shape) * (0.2 if matrix else 0.3) + (not matrix))
        tokens = torch.randint(0, config.vocab_size, (1, LENGTH + 1))
        out = model(tokens, labels=tokens)
        log_p = out.logits[0, :-1].double().log_softmax(-1)
    # As large models are saved, in several files with an index, but for the tied ones.
    model.save_pretrained(directory, max_shard_size="5GB" if config.tie_word_embeddings else "60KB")
    numbers = {
        "tokens": tokens[0],
        "log-probs": log_p.gather(-1, tokens[0, 1:, None]).squeeze(-1),
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "loss": out.loss.double()[None],
    }
    save_file({name: value.contiguous() for name, value in numbers.items()}, directory / NUMBERS)


def read(directory: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights, numbers) that `write` has left."""
    weights = [load_file(path) for path in directory.glob("model*.safetensors")]
    return {name: value for of in weights for name, value in of.items()}, load_file(directory / NUMBERS)
