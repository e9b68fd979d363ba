"""docker-bake.json: what is in it resolves, and what is wrong in it is named, all at once."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bundle.errors import UsageError
from bundle.patches import megatron_core
from tests.tools.images.checkouts import ROOT, change, copied
from tools.images import definition
from tools.images.definition import chosen, targets

IMAGES = definition.load(ROOT)


def test_every_backend_has_its_stacks():
    names = {target.name for target in targets(IMAGES)}
    assert {"cpu", "cuda-mcore0-16", "cuda-mcore0-19"} <= names
    for chip in ("a2", "a3"):
        assert {f"ascend-{chip}", f"ascend-{chip}-mcore0-15", f"ascend-{chip}-mcore0-16"} <= names
    assert len(names) == len(targets(IMAGES))


def test_every_stack_has_a_reviewed_megatron():
    reviewed = megatron_core.load_review_table().references
    assert {stack.pins["megatron-core"].version for stack in IMAGES.stacks.values()} <= set(reviewed)
    newest = IMAGES.stacks["cuda-mcore0.19"].pins["megatron-core"].version
    assert newest == reviewed[-1]


def test_an_ascend_image_needs_no_mindspeed_and_is_locked_with_what_every_megatron_imports():
    assert IMAGES.stacks["ascend"].source is None
    assert "triton-ascend" in IMAGES.stacks["ascend"].pins


def test_no_image_has_two_accelerators():
    for stack in IMAGES.stacks.values():
        assert not {"torch-npu", "transformer-engine"} <= set(stack.pins)


def test_all_violations_at_once(tmp_path):
    root = copied(tmp_path / "copy")
    change(root, "BASES", "cpu", "digest", value="sha256:made-up")
    change(root, "STACKS", "cpu", "pins", "torch", "version", value="$(rm -rf /)")
    change(root, "SOURCES", "efa-installer", "checksum", value="md5:1")
    with pytest.raises(UsageError) as error:
        definition.load(root)
    assert len(error.value.violations) == 3
    assert "BASES.cpu.digest" in str(error.value)


def test_names_must_resolve(tmp_path):
    root = copied(tmp_path / "copy")
    change(root, "STACKS", "ascend-mcore0.15", "source", value="mindspore")
    with pytest.raises(UsageError, match="mindspore"):
        definition.load(root)


def test_an_unknown_target_is_told_the_known_ones():
    with pytest.raises(UsageError, match="cuda-mcore0-17") as error:
        chosen(IMAGES, ["cuda-mcore0-17"])
    assert all(name in str(error.value) for name in ("cpu", "cuda-mcore0-16"))


LEAF = st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.floats(allow_nan=False)
TREE = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner)
)


@settings(max_examples=30)
@given(
    document=TREE
    | st.fixed_dictionaries({"variable": st.dictionaries(st.text(max_size=8), TREE, max_size=3)})
)
def test_a_hostile_document_is_a_usage_error(tmp_path_factory, document):
    root = tmp_path_factory.mktemp("hostile")
    (root / "docker-bake.json").write_text(json.dumps(document))
    with pytest.raises(UsageError):
        definition.load(root)


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 100_000, '{"variable": {"STACKS": {"default": ' + "[" * 5000]
)
def test_a_broken_document_is_a_usage_error(tmp_path, text):
    (tmp_path / "docker-bake.json").write_text(text)
    with pytest.raises(UsageError):
        definition.load(tmp_path)
