"""What transformers computes with a model of random weights: the weights, and the numbers of one sequence."""

import copy
import zlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.families.cases import LENGTH, Case

NUMBERS, GRADIENTS = "numbers.safetensors", "gradients"


def write(case: Case, directory: Path) -> None:
    """Writes the weights as transformers saves them; beside them tokens, log-probs, entropies, loss, and the
    gradient of the loss as if it were a model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(zlib.crc32(case.name.encode()))
    config = AutoConfig.for_model(**copy.deepcopy(dict(case.config)))  # it writes into what it is given
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("inv_freq"):
                continue
            matrix = parameter.ndim > 1
            # Norms that begin with zeros multiply by one more.
            around = not matrix and not (name.endswith("norm.weight") and not parameter.any())
            parameter.copy_(torch.randn(parameter.shape) * (0.2 if matrix else 0.3) + around)
        tokens = torch.randint(0, config.vocab_size, (1, LENGTH + 1))
    # As large models are saved, in several files with an index, but for the tied ones.
    model.save_pretrained(directory, max_shard_size="5GB" if config.tie_word_embeddings else "60KB")
    out = model(tokens, labels=tokens)
    log_p = out.logits[0, :-1].detach().double().log_softmax(-1)
    out.loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    model.save_pretrained(directory / GRADIENTS)
    numbers = {
        "tokens": tokens[0],
        "log-probs": log_p.gather(-1, tokens[0, 1:, None]).squeeze(-1),
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "loss": out.loss.detach().double()[None],
    }
    save_file({name: value.contiguous() for name, value in numbers.items()}, directory / NUMBERS)


def read(directory: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights, numbers) that `write` has left."""
    return tensors(directory), load_file(directory / NUMBERS)


def tensors(directory: Path) -> dict[str, Tensor]:
    """All that the safetensors of a model hold."""
    files = [load_file(path) for path in directory.glob("model*.safetensors")]
    return {name: value for of in files for name, value in of.items()}


def opened(case: Case, directory: Path, tokens: Tensor) -> tuple[set[str], Tensor]:
    """What transformers misses or cannot use in a directory, and the log-probs of the model that it opens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    # transformers has no class for some names that we read: their config is that of another.
    known = {"config": AutoConfig.for_model(**copy.deepcopy(dict(case.config)))} if case.ours else {}
    model, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, **known
    )
    with torch.no_grad():
        log_p = model.eval()(tokens[None]).logits[0, :-1].double().log_softmax(-1)
    wrong = {
        str(each) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for each in report[kind]
    }
    return wrong, log_p.gather(-1, tokens[1:, None]).squeeze(-1)
