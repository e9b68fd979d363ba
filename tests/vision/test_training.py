"""`train` with rows that have images: the same losses in every layout, an export with what belongs to it."""

import json

import numpy as np
import pytest

from bundle.planning.size import compute_model_size
from bundle.planning.tower import compute_tower_flop_coefficients
from bundle.recipe import load
from tests.command import finish, start_training
from tests.vision import rows
from tests.vision.rows import asking, content, image

SHORT = ("train.steps=2", "train.log_interval=1", "train.eval_interval=0", "optimizer.warmup_steps=0")
ROWS = ("train.global_batch_size=8", "train.micro_batch_size=2")
LAYOUTS = {
    "tp2 and sequence parallel": ["parallel.tp=2", "parallel.sequence_parallel=true"],
    "pp2": ["parallel.pp=2"],
    "cp2": ["parallel.cp=2"],
    "dp2": ["devices.per_node=2"],
    "packed": [],
    "packed cp2": ["parallel.cp=2"],
}


def packs(length):
    """A step of one pack; the demo's model is made for sequences of 128 tokens."""
    most = [f"data.sequence_length={length}", f"model.config.max_position_embeddings={length}"]
    return ["data.packed=true", *most, *(f"train.{of}_batch_size=1" for of in ("micro", "global"))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains with these overrides; the loss and the gradient norm of each step, and the run directory."""
    pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("seeing")
    names = [f"images/{number}.png" for number in range(8)]
    given = [asking(f"<image>{'?' * number}", str(number), images=[names[number]]) for number in range(8)]
    given[3] = asking("no image", "at all")
    given[5] = asking("<video> or <image>", "5", images=names[4:5], videos=[names[2:5]])
    files = {name: content(image(16, 16, seed)) for seed, name in enumerate(names)}
    data = rows.write(directory / "data", given, files)

    def of(name, *more):
        run = directory / name
        finish(start_training(str(rows.RECIPE), run, rows.overrides(data, *SHORT, *more)))
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        return [(line["train/loss"], line["train/grad_norm"]) for line in lines if "train/loss" in line], run

    return of


@pytest.fixture(scope="module")
def alone(trained):
    """What one process does, with rows and with a pack of all of them."""
    return {"rows": trained("rows", *ROWS), "packs": trained("packs", *packs(288), "checkpoint.export=null")}


@pytest.mark.slow
def test_an_export_has_what_belongs_to_it(alone):
    found, run = alone["rows"]
    assert len(found) == 2 and found[0] != found[1]
    belongings = {path.name for path in (run / "hf").iterdir()}
    assert {"preprocessor_config.json", "tokenizer.json", "model.safetensors"} <= belongings


def test_rates_count_what_the_tower_computes(alone):
    """Every step has all rows: 7 images of 4 by 4 patches, and a video of as many in 3 frames."""
    _, run = alone["rows"]
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    (first, _) = (line for line in lines if "train/loss" in line)
    seconds, recipe = first["train/step_seconds"], load(str(rows.RECIPE))
    size, tower = (
        compute_model_size(recipe.architecture, recipe.model),
        compute_tower_flop_coefficients(recipe.architecture, recipe.model),
    )
    assert tower is not None
    tokens = round(first["train/tokens_per_second"] * seconds)
    of_images = tower.count_training_flops(np.asarray([[1, 4, 4]] * 7 + [[3, 4, 4]]))
    least = of_images + size.count_step_flops(tokens, 0, 0)
    most = of_images + size.count_step_flops(tokens, tokens * recipe.data.sequence_length // 2, 0)
    assert most - least < of_images / 2
    rate = first["train/tflops_per_device"] * 1e12
    assert least < rate * seconds < most


@pytest.mark.releases
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_same_losses(alone, trained, layout):
    form = "packs" if layout.startswith("packed") else "rows"
    how = packs(288) if form == "packs" else ROWS
    found, _ = trained(layout, *how, *LAYOUTS[layout], "checkpoint.export=null")
    assert found == [pytest.approx(one, rel=1e-4) for one in alone[form][0]]
