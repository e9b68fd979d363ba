"""How far an engine is from models in plain PyTorch that read the same config themselves."""

import functools
from typing import Any

import megatron.core
import torch

from bundle.engine import Engine
from bundle.environment import packages
from bundle.models import naming
from bundle.models.naming import GloballyNamedTensor
from bundle.recipe import Recipe, from_mapping
from bundle.verification.numbers import Bench, Numbers, measure_gap
from tests.engine.cells import AGREES_WITH_DOUBLES
from tests.engine.experiments import UNEVEN, engine, gradients, micro_batches, scored
from tests.reference import experts, model
from tests.reference.configs import CONFIGS
from tests.reference.texts import Text, texts
from tests.reference.weights import drawn, megatron_layout

SEED, SCALE = 11, 0.3  # of the weights; of the losses of multi-token prediction

PREDICTING = "(m)*depths"  # stands for a layer m for each depth of the model

# (parallel sizes, form of the micro-batches)
LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "packed": ({}, "thd"),
    "rows": ({}, "bshd"),
    "tp": ({"tp": 2}, "bshd"),
    "tp packed": ({"tp": 2}, "thd"),
    "cp": ({"cp": 2}, "thd"),
    "pp": ({"pp": 2, "num_layers_in_first_pipeline_stage": 3}, "thd"),
    "vpp": ({"pp": 2, "vpp": 2}, "bshd"),
    "laid out": ({"pp": 2, "pipeline_model_parallel_layout": f"E|tt|t|t{PREDICTING}L"}, "bshd"),
    "ep": ({"ep": 2}, "thd"),
    "tp ep": ({"tp": 2, "ep": 2, "etp": 1}, "thd"),
}


def recipe(config: dict[str, Any], parallel: dict[str, Any], *, packed: bool) -> Recipe:
    """A job that trains this model in fp32."""
    if config["model_type"] == "gpt_oss":  # experts with biases are never cut
        parallel = {**parallel, "etp": 1}
    if layout := parallel.get("pipeline_model_parallel_layout"):
        layout = layout.replace(PREDICTING, "m" * model.depths(config))
        parallel = {**parallel, "pipeline_model_parallel_layout": layout}
    return from_mapping(
        {
            "name": "oracle",
            "model": {"config": config, "dtype": "fp32", "mtp": {"loss_scale": SCALE}},
            "parallel": parallel,
            "data": {
                "source": "text",
                "path": ["none"],
                "tokenizer": "hf:none",
                "sequence_length": 96,
                "packed": packed,
            },
            "train": {"steps": 2, "global_batch_size": 8},
            "optimizer": {"lr": 1e-2, "warmup_steps": 0},
        },
    )


def compare(bench: Bench, name: str, layout: str) -> float:
    """The largest relative distance of losses, scores, gradients and their norm from the plain model's."""
    config, (parallel, form) = CONFIGS[name], LAYOUTS[layout]
    wanted, sequences = _wanted(name), sequences_of(name)
    with engine(bench, recipe(config, parallel, packed=form == "thd")) as made:
        parts = {each.name: each for each in parameters(made)}
        fill(made, megatron_layout(config, drawn(config, SEED)))
        batches = micro_batches(made, sequences, form, "token")
        seen = scored(made, batches, sequences)
        made.forward_backward(batches)
        losses = made.take_losses()
        for k, value in enumerate((losses.main, *losses.mtp)):
            seen[f"loss {k}"] = torch.tensor(value, dtype=torch.float64)
        expected = {key: wanted[key] for key in seen}
        for key, (gradient, _) in gradients(made).items():
            seen[key], expected[key] = gradient.clone(), part(parts[key], wanted[key])  # `step` clips it
        seen["norm"], expected["norm"] = (
            torch.tensor(made.step_optimizer().grad_norm).double(),
            wanted["norm"],
        )
        return measure_gap(seen, expected)


@functools.cache
def sequences_of(name: str) -> list[Text]:
    return texts(UNEVEN, CONFIGS[name]["vocab_size"])


def predictions(name: str) -> list[float]:
    """The plain model's loss of each depth of multi-token prediction."""
    found = _wanted(name)
    return [float(found[f"loss {k}"]) for k in range(1, model.depths(CONFIGS[name]) + 1)]


@functools.cache
def _wanted(name: str) -> Numbers:
    """The plain model's numbers, gradients under megatron's names; once for all layouts of a process."""
    config = CONFIGS[name]
    found = model.trained(config, drawn(config, SEED), sequences_of(name), scale=SCALE)
    of = {key.removeprefix("gradient "): found.pop(key) for key in list(found) if key.startswith("gradient ")}
    norm = torch.stack([gradient.square().sum() for gradient in of.values()]).sum().sqrt()
    return found | megatron_layout(config, of) | {"norm": norm}


def parameters(of: Engine) -> list[GloballyNamedTensor]:
    return [each for chunk in of.models for each in naming.find_parameters(chunk, of.groups)]


def fill(of: Engine, weights: Numbers) -> None:
    """Overwrites every weight of the engine's model, and the biases that steer the choice of experts."""
    names = {}
    with torch.no_grad():
        for each in parameters(of):
            names[each.parameter] = each.name
            each.parameter.copy_(part(each, weights[each.name]))
        for chunk in of.models:
            for module in chunk.modules():
                if getattr(module, "expert_bias", None) is not None:
                    router = names[module.weight].removesuffix(".weight")
                    module.expert_bias.copy_(weights[f"{router}.expert_bias"])


def part(of: GloballyNamedTensor, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor, to which the rows of a padded vocabulary are added."""
    behind = of.compute_full_shape()[0] - len(whole)
    whole = torch.cat((whole, whole.new_zeros(behind, *whole.shape[1:]))) if behind else whole
    return of.shard.extract(whole) if of.shard else whole


def worst(bench: Bench, name: str, layouts: tuple[str, ...]) -> float:
    """The largest distance of a model in these layouts; an error that names those that are too far."""
    gaps = {layout: compare(bench, name, layout) for layout in layouts if _possible(name, layout)}
    wrong = [
        f"{layout}: {distance:.1e}"
        for layout, distance in gaps.items()
        if not distance <= AGREES_WITH_DOUBLES
    ]
    assert not wrong, f"{name} at {'; '.join(wrong)}"
    return max(gaps.values(), default=0.0)  # each is a number, or it would be among the wrong ones


def _possible(name: str, layout: str) -> bool:
    """Without what means nothing for the model, and what this release cannot do, by its known traps."""
    config, (parallel, form) = CONFIGS[name], LAYOUTS[layout]
    if "ep" in parallel and not experts.number(config):
        return False
    release = megatron.core.__version__
    if config["model_type"] == "gpt_oss" and "tp" in parallel and "ep" not in parallel:
        return not packages.is_base_version_within(
            release, "<0.19"
        )  # the trap moe-tensor-without-expert-parallel
    depths = model.depths(config)
    if "pipeline_model_parallel_layout" in parallel and packages.is_base_version_within(
        release, "<0.14" if depths else "<0.13"
    ):
        return False
    if not depths:
        return True
    packed, over_tensor_ranks = form == "thd", "tp" in parallel
    return not (packed and packages.is_base_version_within(release, "<0.16")) and not (
        over_tensor_ranks and packages.is_base_version_within(release, "<0.13")
    )


def __getattr__(name: str) -> Any:
    """The measurement `MODEL on 1` or `MODEL on 2` (ranks)."""
    found, on, ranks = name.partition(" on ")
    if not on:
        raise AttributeError(name)
    chosen = tuple(layout for layout, (sizes, _) in LAYOUTS.items() if bool(sizes) == (ranks == "2"))
    return functools.partial(worst, name=found, layouts=chosen)
