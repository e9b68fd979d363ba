"""Keys that transformers' base class knows are not refused as misspelt: what it has is read in its source."""

import ast
import importlib.util
from pathlib import Path

import pytest

from bundle.architectures import from_config
from bundle.architectures.config import IRRELEVANT_KEYS
from bundle.errors import UsageError
from bundle.planning.plan import build_plan
from bundle.recipe import load

LLAMA = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256,
}  # fmt: skip
# They change the model unless they are empty.
CHANGES = {
    "pruned_heads": {"0": [1]},
    "add_cross_attention": True,
    "cross_attention_hidden_size": 8,
    "per_layer_config": {"0": {"hidden_size": 32}},
}


def _names_in(file: str, name: str) -> set[str]:
    """The fields of a class of transformers, what its methods take out of keyword arguments, and defaults."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / file).read_text())
    (of,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    names = {
        node.target.id
        for node in of.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and "ClassVar" not in ast.unparse(node.annotation)
    }
    methods = [node for node in of.body if isinstance(node, ast.FunctionDef)]
    for method in methods:
        if method.name in ("__init__", "__post_init__"):
            calls = [node for node in ast.walk(method) if isinstance(node, ast.Call)]
            names |= {
                call.args[0].value
                for call in calls
                if isinstance(call.func, ast.Attribute) and call.func.attr in ("pop", "get") and call.args
                if isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
            }
        if method.name == "_get_default_generation_params":
            for node in ast.walk(method):
                if isinstance(node, ast.Dict):
                    names |= {str(key.value) for key in node.keys if isinstance(key, ast.Constant)}
    return {
        name for name in names if not name.startswith(("_bos_", "_eos_", "_pad_", "_decoder_", "_original_"))
    }


@pytest.mark.parametrize(
    ("file", "name", "least"),
    [
        ("configuration_utils.py", "PreTrainedConfig", 15),
        ("generation/configuration_utils.py", "GenerationConfig", 60),
    ],
)
def test_every_key_of_the_base_class_is_known(file, name, least):
    pytest.importorskip("transformers")
    names = _names_in(file, name)
    assert len(names) >= least
    of_the_model = {"rope_scaling", "rope_theta"}
    private = {name for name in names if name.endswith(("_tensor", "_hash", "_length")) and name[0] == "_"}
    assert names - IRRELEVANT_KEYS - CHANGES.keys() - of_the_model - private == set()


def test_such_keys_leave_the_model_as_it_is():
    values = dict.fromkeys(sorted(IRRELEVANT_KEYS - {"model_type", "quantization_config"}), 3)
    assert from_config(LLAMA | values) == from_config(LLAMA)


@pytest.mark.parametrize("name", CHANGES)
def test_a_key_that_would_change_the_model_is_refused_unless_it_is_empty(name):
    empties: tuple[object, ...] = ({}, False, None, 0)
    for empty in empties:
        assert from_config(LLAMA | {name: empty}) == from_config(LLAMA)
    with pytest.raises(UsageError) as refused:
        from_config(LLAMA | {name: CHANGES[name]})
    (said,) = refused.value.violations
    assert said.startswith(f"{name} ") and "unknown key" not in said


def test_a_plan_names_the_keys_that_have_no_effect():
    recipe = load("demo", ["model.config.num_labels=3", "model.config.gradient_checkpointing=true"])
    (note,) = [note for note in build_plan(recipe).notes if note.startswith("model.config: ")]
    assert "num_labels" in note and "gradient_checkpointing" in note
    off = load("demo", ["model.config.gradient_checkpointing=false", "model.config.id2label={}"])
    assert not [note for note in build_plan(off).notes if note.startswith("model.config: ")]
