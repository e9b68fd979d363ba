"""FLOPs of a tower are those that torch counts in transformers' own, whatever of it is trained."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bundle.architectures import from_config
from bundle.architectures.tensors import TOWER_PREFIX
from bundle.planning.size import compute_model_size
from bundle.planning.tower import compute_tower_flop_coefficients
from bundle.recipe import load
from bundle.recipe.recipe import Model
from bundle.runs.metrics import Speed
from tests.planning.jobs import job
from tests.vision import reference
from tests.vision.cases import CASES, Case

CPU = torch.device("cpu")
ROWS = {"source": "jsonl", "path": ["rows"], "tokenizer": "hf:none", "template": "chat"}
TRAINED: dict[str, dict[str, Any]] = {
    "all": {},
    "projector": {"vision": {"freeze_tower": True}},
    "tower": {"vision": {"freeze_projector": True}},
    "nothing": {"vision": {"freeze_tower": True, "freeze_projector": True}},
    "adapters of the decoder": {"lora": {"rank": 2, "alpha": 2, "targets": ["q_proj"]}},
    "adapters of blocks": {"lora": {"rank": 2, "alpha": 2, "targets": ["qkv", "q_proj"]}},
}


# Of 5 embeddings in height and width, where the others' have 1 or 2.
WINDOW = {"vision_config": CASES[0].config["vision_config"] | {"window_size": 40}}
WIDE = Case("wide windows", CASES[0].config | WINDOW)


@pytest.fixture(params=[*CASES, WIDE], ids=lambda case: case.name)
def case(request):
    return request.param


@pytest.fixture
def grids(case):
    """Images and videos, most of which do not divide into windows."""
    drawn, side = random.Random(case.name), case.vision.merge_size
    sizes = [[drawn.randint(1, 3), side * drawn.randint(1, 7), side * drawn.randint(1, 7)] for _ in range(4)]
    return np.asarray([*sizes, [2, 3 * side, 5 * side]], np.int64)


def counted(case, grids, model):
    """What torch counts, forward and backward; behind adapters of blocks all lets gradients by."""
    tower = reference.tower(case)
    for name, parameter in tower.named_parameters():
        parameter.requires_grad_(
            model.lora is None and not model.vision.is_tensor_frozen(f"{TOWER_PREFIX}{name}")
        )
    if model.lora and "qkv" in model.lora.targets:
        tower.patch_embed.register_forward_hook(lambda of, given, out: out.requires_grad_())
    v = case.vision
    pixels = torch.randn(int(grids.prod(1).sum()), v.values_per_patch)
    with FlopCounterMode(display=False) as flops:
        seen = tower(pixels, grid_thw=torch.from_numpy(grids))
        outs = [seen.pooler_output, *(getattr(seen, "deepstack_features", None) or ())]
        if any(out.requires_grad for out in outs):
            sum(out.square().sum() for out in outs).backward()
    return flops.get_total_flops()


@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.slow
def test_flops_are_those_that_torch_counts(case, grids, trained):
    model = Model.model_validate({"config": case.config, **TRAINED[trained]})
    ours = compute_tower_flop_coefficients(from_config(case.config), model)
    assert ours is not None
    assert ours.count_training_flops(grids) == counted(case, grids, model)


def test_a_rank_counts_its_share_of_text_and_images(case, grids):
    recipe = job(case.config, task="sft", data=ROWS, parallel={"tp": 2})
    whole = compute_model_size(recipe.architecture).count_training_flops([40, 7])
    tower = compute_tower_flop_coefficients(recipe.architecture, recipe.model)
    assert tower is not None
    whole += tower.count_training_flops(grids)
    assert Speed(recipe, "cpu", CPU, dp=1).compute_flops_per_rank([40, 7], grids) == whole / 2


def test_a_model_without_a_tower_has_none():
    recipe = load("demo")
    assert compute_tower_flop_coefficients(recipe.architecture, recipe.model) is None
