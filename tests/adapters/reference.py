"""What transformers computes with W + alpha / rank * B A in the place of W, and the gradients of A and B.

They follow from the gradient G of the sum: A's is alpha / rank * B^T G, and B's alpha / rank * G A^T.
"""

import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.adapters.cases import ALPHA, RANK, Case
from tests.families import reference

ADAPTER, NUMBERS = "adapter", "wanted.safetensors"
BARE = "log-probs of the model alone"
SCALE = ALPHA / RANK
_PREFIX = "base_model.model."


def write(case: Case, directory: Path) -> None:
    """Writes the model as transformers saves it, an adapter of random A and B, log-probs and gradients.

    The log-probs are those of both and those of the model alone.
    """
    reference.write(case.of, directory)
    weights, _ = reference.read(directory)
    generator = torch.Generator().manual_seed(zlib.crc32(case.of.name.encode()))
    given = {}
    for name, value in sorted(weights.items()):
        module = name.removesuffix(".weight")
        if any(module.endswith(f".{target}") for target in case.targets):
            given[f"{module}.lora_A.weight"] = torch.randn(RANK, value.shape[1], generator=generator) * 0.2
            given[f"{module}.lora_B.weight"] = torch.randn(value.shape[0], RANK, generator=generator) * 0.2
    _write_adapter(case, given, directory)
    model = opened(directory)
    bare = log_probs(model, tokens_of(directory))
    with torch.no_grad():
        for module, part in _parts(model):
            if f"{module}.lora_A.weight" in given:
                a, b = (given[f"{module}.lora_{which}.weight"].double() for which in "AB")
                part.add_(SCALE * b @ a)
    tokens = tokens_of(directory)
    model(tokens, labels=tokens).loss.backward()
    wanted = {"log-probs": log_probs(model, tokens)}
    for module, gradient in _parts(model, of_gradients=True):
        if f"{module}.lora_A.weight" in given:
            a, b = (given[f"{module}.lora_{which}.weight"].double() for which in "AB")
            wanted[f"{module}.lora_A.weight"] = SCALE * b.T @ gradient
            wanted[f"{module}.lora_B.weight"] = SCALE * gradient @ a.T
    assert wanted.keys() - {"log-probs"} == given.keys()
    wanted[BARE] = bare
    save_file({name: value.contiguous() for name, value in wanted.items()}, directory / NUMBERS)


def adapter(directory: Path) -> dict[str, Tensor]:
    """A and B of a directory of PEFT, by the names of the modules that they are beside."""
    found = load_file(directory / "adapter_model.safetensors")
    return {name.removeprefix(_PREFIX): value for name, value in found.items()}


def opened(directory: Path) -> Any:
    """The model in float64, its experts one by one."""
    from transformers import AutoModelForCausalLM

    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, **eager).eval()


def tokens_of(directory: Path) -> Tensor:
    """[1, tokens]."""
    return reference.read(directory)[1]["tokens"][None]


def log_probs(model: Any, tokens: Tensor) -> Tensor:
    """Of every token but the first."""
    with torch.no_grad():
        log_p = model(tokens).logits[0, :-1].log_softmax(-1)
    return log_p.gather(-1, tokens[0, 1:, None]).squeeze(-1)


def _write_adapter(case: Case, given: dict[str, Tensor], directory: Path) -> None:
    """By PEFT itself; where experts have adapters by hand, since PEFT stacks them as transformers 5 does."""
    if any("experts." in name for name in given):
        (directory / ADAPTER).mkdir()
        said = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(case.targets)}
        (directory / ADAPTER / "adapter_config.json").write_text(json.dumps(said))
        named = {f"{_PREFIX}{name}": value for name, value in given.items()}
        save_file(named, directory / ADAPTER / "adapter_model.safetensors")
        return
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=list(case.targets), lora_dropout=0.1, task_type="CAUSAL_LM"
    )
    made = get_peft_model(model, config)
    named = {f"{_PREFIX}{name}": value for name, value in given.items()}
    assert not set_peft_model_state_dict(made, named).unexpected_keys
    made.save_pretrained(directory / ADAPTER)


def _parts(model: Any, *, of_gradients: bool = False) -> Iterator[tuple[str, Tensor]]:
    """(published module, its part of a parameter or of that's gradient): transformers stacks experts."""
    for name, parameter in model.named_parameters():
        values = parameter.grad if of_gradients else parameter
        if (stacked := re.search(r"(.*\.experts)\.(gate_up_proj|down_proj)$", name)) is None:
            yield name.removesuffix(".weight"), values
            continue
        for number, expert in enumerate(values):
            names = ("gate_proj", "up_proj") if stacked[2] == "gate_up_proj" else ("down_proj",)
            for own, part in zip(names, expert.chunk(len(names)), strict=True):
                yield f"{stacked[1]}.{number}.{own}", part
