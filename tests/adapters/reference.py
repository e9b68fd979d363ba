"""What transformers computes with the merged weight in the place of W, and the gradients of A, B and m.

They follow from the gradient G of W + s B A: A's is s B^T G, and B's s G A^T. With DoRA the merged weight is
m / n (W + s B A), where the norm n is constant. Where PEFT has the options, the numbers are its own.
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

from tests.adapters.cases import ALPHA, LR_RATIO, OPTIMIZER, RANK, Case
from tests.families import reference

ADAPTER, NUMBERS = "adapter", "wanted.safetensors"
BARE = "log-probs of the model alone"
STEPPED = "stepped.safetensors"
_PREFIX = "base_model.model."


def write(case: Case, directory: Path) -> None:
    """Writes the model as transformers saves it, an adapter of random A and B, log-probs and gradients.

    The log-probs are those of both and those of the model alone. Also writes the adapter after one step.
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
            if case.options.get("use_dora"):
                factor = 0.5 + torch.rand(value.shape[0], generator=generator)
                given[f"{module}.lora_magnitude_vector"] = value.norm(dim=1) * factor
    _write_adapter(case, given, directory)
    model, tokens = opened(directory), tokens_of(directory)
    bare = log_probs(model, tokens)
    is_peft = bool(case.options) and not any("experts." in name for name in given)
    if is_peft:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, directory / ADAPTER, is_trainable=True).eval()
    else:
        before = _merge_all(model, given, case.scale)
    model(tokens, labels=tokens).loss.backward()
    wanted = {"log-probs": log_probs(model, tokens)}
    if is_peft:
        wanted |= {name: parameter.grad.clone() for name, parameter in _of_peft(model).items()}
        stepped = _step_of_peft(model)
    else:
        for module, gradient in _parts(model, of_gradients=True):
            wanted |= _gradients(module, gradient, before.get(module), given, case.scale)
        stepped = _step(given, wanted)
    assert wanted.keys() - {"log-probs"} == given.keys() == stepped.keys()
    wanted[BARE] = bare
    for numbers, file in ((wanted, NUMBERS), (stepped, STEPPED)):
        save_file({name: value.contiguous() for name, value in numbers.items()}, directory / file)


def merged(module: str, weight: Tensor, given: dict[str, Tensor], scale: float) -> Tensor:
    """A weight with its adapter, if it has one, in float64."""
    if f"{module}.lora_A.weight" not in given:
        return weight.double()
    a, b = (given[f"{module}.lora_{which}.weight"].double() for which in "AB")
    summed = weight.double() + scale * b @ a
    magnitude = given.get(f"{module}.lora_magnitude_vector")
    return summed if magnitude is None else summed * (magnitude / summed.norm(dim=1))[:, None]


def _merge_all(model: Any, given: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The weights of adapted modules before every weight was merged."""
    before = {}
    with torch.no_grad():
        for module, part in _parts(model):
            if f"{module}.lora_A.weight" in given:
                before[module] = part.clone()
                part.copy_(merged(module, part, given, scale))
    return before


def _gradients(
    module: str, gradient: Tensor, weight: Tensor | None, given: dict[str, Tensor], scale: float
) -> dict[str, Tensor]:
    """The gradients of a module's A, B and magnitude, by their names."""
    if weight is None:
        return {}
    a, b = (given[f"{module}.lora_{which}.weight"].double() for which in "AB")
    found = {}
    if (magnitude := given.get(f"{module}.lora_magnitude_vector")) is not None:
        summed = weight + scale * b @ a
        found[f"{module}.lora_magnitude_vector"] = (gradient * summed).sum(1) / summed.norm(dim=1)
        gradient = gradient * (magnitude / summed.norm(dim=1))[:, None]
    return found | {
        f"{module}.lora_A.weight": scale * b.T @ gradient,
        f"{module}.lora_B.weight": scale * gradient @ a.T,
    }


def _step(given: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """All of the adapter after torch's first step of AdamW, with the rates of LoRA+."""
    parameters = {name: torch.nn.Parameter(value.double()) for name, value in given.items()}
    for name, parameter in parameters.items():
        parameter.grad = wanted[name].clone()
    lr, decay = OPTIMIZER["lr"], OPTIMIZER["weight_decay"]
    groups = [
        {
            "params": [parameter],
            "lr": lr * (1 if ".lora_A." in name else LR_RATIO),
            "weight_decay": decay if parameter.ndim > 1 else 0,
        }
        for name, parameter in parameters.items()
    ]
    torch.nn.utils.clip_grad_norm_(parameters.values(), OPTIMIZER["clip_grad"])
    torch.optim.AdamW(groups, eps=OPTIMIZER["eps"]).step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def _step_of_peft(model: Any) -> dict[str, Tensor]:
    """All of PEFT's adapter after a step of PEFT's optimizer of LoRA+; here vectors have no weight decay."""
    from peft.optimizers import create_loraplus_optimizer

    optimizer = create_loraplus_optimizer(
        model,
        torch.optim.AdamW,
        lr=OPTIMIZER["lr"],
        loraplus_lr_ratio=LR_RATIO,
        loraplus_weight_decay=OPTIMIZER["weight_decay"],
        eps=OPTIMIZER["eps"],
    )
    *_, with_decay, without = optimizer.param_groups
    without["params"] += [parameter for parameter in with_decay["params"] if parameter.ndim == 1]
    with_decay["params"] = [parameter for parameter in with_decay["params"] if parameter.ndim > 1]
    torch.nn.utils.clip_grad_norm_(_of_peft(model).values(), OPTIMIZER["clip_grad"])
    optimizer.step()
    return {name: parameter.detach() for name, parameter in _of_peft(model).items()}


def _of_peft(model: Any) -> dict[str, torch.nn.Parameter]:
    """All that PEFT trains, by the names of its files."""
    return {
        name.removeprefix(_PREFIX)
        .replace(".default", "")
        .replace("magnitude_vector.weight", "magnitude_vector"): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


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
        (directory / ADAPTER / "adapter_config.json").write_text(json.dumps(said | dict(case.options)))
        named = {f"{_PREFIX}{name}": value for name, value in given.items()}
        save_file(named, directory / ADAPTER / "adapter_model.safetensors")
        return
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=list(case.targets),
        lora_dropout=0.1,
        task_type="CAUSAL_LM",
        **case.options,
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
