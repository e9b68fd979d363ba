"""Adapters of models that see images, beside the tower's layers too, compute and learn what PEFT's do."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bundle.architectures import adapters, from_config
from bundle.architectures.tensors import Tensors
from tests.families.record import note
from tests.vision import adapting, reference
from tests.vision.adapting import ALONE, HUB
from tests.vision.cases import CASES

AGREES, OF_GRADIENTS = 1e-5, 3e-5  # of the largest; both sides are float32


@pytest.fixture(scope="module")
def adapted(seen, tmp_path_factory) -> Path:
    """A directory for each case with what PEFT makes and computes."""
    pytest.importorskip("peft")
    root: Path = tmp_path_factory.mktemp("adapted")
    for case in HUB:
        (root / case.name).mkdir()
        (root / case.name / "model").symlink_to(seen / case.name)
        adapting.write(case, seen / case.name, root / case.name)
    return root


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.parametrize(
    "layout",
    [pytest.param(of, marks=() if of == ALONE else pytest.mark.releases) for of in adapting.LAYOUTS],
)
def test_adapters_are_those_of_peft(adapted, core, layout):
    ranks = 2 if adapting.LAYOUTS[layout] else 1
    said = core.world.run("tests.vision.adapting", ranks, str(adapted), layout, timeout=500)
    found = json.loads(said[0].splitlines()[-1])
    assert len(found) == len(HUB)
    assert not {name: far for name, far in found.items() if not far["log-probs"] <= AGREES}
    assert not {name: far for name, far in found.items() if not far["gradients"] <= OF_GRADIENTS}
    note(core.version, f"LoRA {layout}", {case.family: max(found[case.name].values()) for case in HUB})
    if layout == ALONE:
        for case in HUB:
            exported(adapted / case.name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_all_linear_are_the_layers_that_peft_takes_by_that_word_and_by_our_targets(case):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForImageTextToText

    def taken(targets):
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(reference._config(case))
        found = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets))
        return {f".{name.removeprefix('model.')}" for name in found.base_model.targeted_module_names}

    table = Tensors(from_config(case.config))
    theirs, targets = taken("all-linear"), adapters.list_shortest_linear_suffixes(table)
    ours = {
        adapting.tail(pair.a.name.removesuffix(".lora_A.weight"))
        for tensor in table
        for pair in filter(None, adapters.build_adapter_pairs(tensor, targets, 2))
    }
    assert taken(targets) == theirs
    assert {name.replace(".language_model.", ".") for name in theirs} == ours


def exported(directory):
    """PEFT opens the adapter that is exported beside the model, transformers the model with it merged."""
    from peft import PeftModel

    given, ours = (
        load_file(directory / of / "adapter_model.safetensors") for of in (adapting.ADAPTER, "out")
    )
    assert given.keys() == ours.keys()
    assert all(torch.equal(given[name], ours[name]) for name in given)
    _, numbers = reference.read(directory / "model")
    wanted = load_file(directory / adapting.NUMBERS)["first log-probs"]
    beside = PeftModel.from_pretrained(adapting.opened(directory / "model"), str(directory / "out"))
    for model in (beside, adapting.opened(directory / adapting.MERGED)):
        with torch.no_grad():
            far = (adapting.of_sequence(model, numbers, "first") - wanted).abs().max() / wanted.abs().max()
        assert far <= AGREES
