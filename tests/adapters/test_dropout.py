"""Dropout of adapters is PEFT's, and ranks that see the same input drop the same values."""

import json

import pytest

from bundle.architectures import adapters
from bundle.errors import UsageError
from bundle.recipe.recipe import LoRA
from tests.adapters.dropout import LAYOUTS, PEFT, SAME
from tests.adapters.test_refusals import WRITTEN, with_lora


@pytest.mark.world
def test_ranks_drop_what_the_layer_s_input_asks_for(core):
    pytest.importorskip("peft")
    said = core.world.run("tests.adapters.dropout", 2, timeout=300)
    found = json.loads(said[0].splitlines()[-1])
    assert found.pop(PEFT) < 1e-6
    for layout in LAYOUTS:
        same = found[layout].pop("same")
        assert same == {kind: [is_same] for kind, is_same in SAME[layout].items()}, layout
        assert all(found[layout].values()), found[layout]


def test_a_directory_s_dropout_is_read_and_may_be_replaced(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(WRITTEN | {"lora_dropout": 0.25}))
    assert with_lora(model={"lora": {"path": str(tmp_path)}}).model.lora.dropout == 0.25
    assert with_lora(model={"lora": {"path": str(tmp_path), "dropout": 0.0}}).model.lora.dropout == 0
    values = LoRA(dropout=0.25).model_dump()
    assert adapters.build_adapter_config(values, None)["lora_dropout"] == 0.25


def test_dropout_with_magnitudes_is_refused(tmp_path, messages):
    (tmp_path / "adapter_config.json").write_text(
        json.dumps(WRITTEN | {"lora_dropout": 0.25, "use_dora": True})
    )
    with pytest.raises(UsageError) as error:
        with_lora(model={"lora": {"path": str(tmp_path)}})
    (said,) = error.value.violations
    assert said.startswith("model.lora.dropout: ") and "0.25" in said and "model.lora.use_dora" in said
    messages(said)
    assert with_lora(model={"lora": {"path": str(tmp_path), "dropout": 0}}).model.lora.use_dora


@pytest.mark.parametrize("wrong", [1, 1.5, -0.1, "0.1", True])
def test_a_share_that_cannot_be_dropped_is_refused(tmp_path, wrong):
    (tmp_path / "adapter_config.json").write_text(json.dumps(WRITTEN | {"lora_dropout": wrong}))
    with pytest.raises(UsageError) as of_file:
        with_lora(model={"lora": {"path": str(tmp_path)}})
    assert any("model.lora.path" in each and "lora_dropout" in each for each in of_file.value.violations)
    if wrong not in ("0.1", True):
        with pytest.raises(UsageError) as of_key:
            with_lora(model={"lora": {"rank": 4, "dropout": wrong}})
        assert any("model.lora.dropout" in each for each in of_key.value.violations)
