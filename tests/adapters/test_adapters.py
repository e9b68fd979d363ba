"""Adapters compute what transformers does with merged weights and what PEFT does, in every layout."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bundle.environment import packages
from tests.adapters import reference
from tests.adapters.cases import CASES
from tests.adapters.rank import LAID_OUT, LAYOUTS, SECOND
from tests.families import reference as families
from tests.families.record import note

AGREES = 1e-5  # of the largest number
# Of ranks: the layouts of the installed release, whose every kind of exchange is among them.
_FEW = {
    1: ["one process", "recomputed"],
    2: ["tp2 and sequence parallel", "etp2", "pp2", LAID_OUT, "packed cp2"],
    4: ["etp2 and ep2"],
}
_ALL = _FEW | {2: [layout for layout in LAYOUTS if layout not in _FEW[1] + _FEW[4]]}


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> Path:
    """A directory for each case with what transformers and PEFT make."""
    pytest.importorskip("peft")
    root: Path = tmp_path_factory.mktemp("adapters")
    for case in CASES.values():
        reference.write(case, root / case.name)
    return root


@pytest.mark.world
def test_every_layout_computes_and_trains_as_transformers_does(directories, core, tmp_path):
    """And goes on from the checkpoint of one process; beside the adapters nothing asks for a gradient."""
    root = tmp_path / "root"
    root.mkdir()
    for case in CASES.values():  # a release leaves checkpoints of its own
        (root / case.name).mkdir()
        for path in (directories / case.name).iterdir():
            (root / case.name / path.name).symlink_to(path)
    wrong, far = [], dict.fromkeys((case.of.family for case in CASES.values()), 0.0)
    left_out = (
        {LAID_OUT} if packages.is_base_version_within(core.version, "<0.13") else set()
    )  # it has no layout string
    for ranks, named in (_ALL if core.tree else _FEW).items():
        layouts = [layout for layout in named if layout not in left_out]
        said = core.world.run("tests.adapters.rank", ranks, str(root), *layouts, timeout=500)
        found = json.loads(said[0].splitlines()[-1])
        assert len(found) >= len(layouts)
        for name, of in found.items():
            family = CASES[name.partition(": ")[2]].of.family
            far[family] = max(far[family], *of.values())
        wrong += [
            f"{name}: {what} {distance:.1e}"
            for name, of in found.items()
            for what, distance in of.items()
            if not distance <= AGREES
        ]
    assert not wrong
    note(core.version, "LoRA", far)
    for case in CASES.values():
        given = reference.adapter(root / case.name / reference.ADAPTER)
        for out in (root / case.name / "out").iterdir():
            ours = reference.adapter(out / "peft")
            assert ours.keys() == given.keys(), out.name
            assert all(torch.equal(ours[name], given[name]) for name in given), out.name
            merged = {
                key: value for file in out.glob("hf/*.safetensors") for key, value in load_file(file).items()
            }
            _assert_merged(merged, given, families.read(root / case.name)[0], case.scale, out.name)
    if core.tree is None:
        for case in CASES.values():
            _assert_opened(root / case.name, beside=case.loads)


def _assert_merged(merged, given, before, scale, where):
    modules = {name.removesuffix(".lora_A.weight") for name in given if "lora_A" in name}
    for name, value in merged.items():
        module = name.removesuffix(".weight")
        expected = reference.merged(module, before[name], given, scale)
        assert (value - expected).abs().max() <= 1e-6 * expected.abs().max(), f"{where} {name}"
    assert modules <= {name.removesuffix(".weight") for name in merged}


def _assert_opened(directory: Path, *, beside: bool):
    """transformers opens the merged model, and PEFT the adapter beside the model that it belongs to."""
    from peft import PeftModel

    tokens = reference.tokens_of(directory)
    wanted = load_file(directory / reference.NUMBERS)["log-probs"]
    out = directory / "out" / "one process"
    models = [reference.opened(out / "hf")]
    if beside:
        models.append(PeftModel.from_pretrained(reference.opened(directory), out / "peft"))
    for model in models:
        seen = reference.log_probs(model, tokens)
        assert (seen - wanted).abs().max() <= AGREES * wanted.abs().max()
    second = reference.adapter(directory / SECOND)
    assert all(
        not torch.equal(second[name], value) for name, value in reference.adapter(out / "peft").items()
    )
