"""The TransformerConfig fields of the cuda backend, without a GPU."""

import sys
from enum import Enum

import pytest
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from bundle.backends.cuda import runtime as module
from bundle.backends.cuda.runtime import build_config_options
from bundle.environment.hardware import build_preset
from bundle.errors import EnvironmentUnfit, UsageError
from bundle.patches.entry import PatchAction
from bundle.planning import build_plan
from bundle.recipe import load
from tests.planning.jobs import plan

HOPPER = "9.0"
YARN = "model.config.rope_scaling={type: yarn, factor: 4, original_max_position_embeddings: 64}"


def recipe(*overrides: str, name: str = "demo"):
    return load(name, ("backend=cuda", "model.dtype=bf16", *overrides))


@pytest.mark.parametrize("name", ["demo", "qwen3-tp2-sp", "qwen3-cp2-packed"])
def test_every_field_is_one_of_this_release(name):
    fields = {*TransformerConfig.__dataclass_fields__, *MLATransformerConfig.__dataclass_fields__}
    for fp8 in ("null", "{scaling: delayed}", "{scaling: blockwise}"):
        chosen = build_config_options(recipe(f"model.fp8={fp8}", name=name), generation=HOPPER)
        assert set(chosen) <= fields


@pytest.mark.parametrize(
    ("name", "overrides"),
    [("qwen3-tp2-sp", ()), ("demo", ()), ("demo", (YARN,))],
)
def test_rotary_positions_are_one_kernel(name, overrides):
    assert build_config_options(recipe(*overrides, name=name), generation=HOPPER)["apply_rope_fusion"] is True


@pytest.mark.parametrize("overrides", [(), (YARN,)])
def test_latent_rotary_positions_are_not_fused_where_their_kernel_knows_no_context_parallelism(
    monkeypatch, overrides
):
    fusion = pytest.importorskip("megatron.core.fusions.fused_mla_yarn_rope_apply")
    monkeypatch.setattr(fusion, "fused_apply_mla_rope_for_q", lambda t, cos, sin, qk, emb, cu=None: t)
    assert build_config_options(recipe(*overrides), generation=HOPPER)["apply_rope_fusion"] is False


@pytest.mark.parametrize("width", ["qk_nope_head_dim", "v_head_dim"])
def test_latent_rotary_positions_are_not_fused_for_widths_that_triton_refuses(width):
    chosen = build_config_options(recipe(f"model.config.{width}=96"), generation=HOPPER)
    assert chosen["apply_rope_fusion"] is False


def test_experts_are_grouped_and_dense_models_have_none():
    assert build_config_options(recipe(), generation=HOPPER)["moe_grouped_gemm"] is True
    assert "moe_grouped_gemm" not in build_config_options(recipe(name="qwen3-tp2-sp"), generation=HOPPER)


@pytest.mark.parametrize("there", [True, False])
def test_gradients_are_accumulated_in_the_product_where_it_can(there, monkeypatch):
    monkeypatch.setattr(module, "can_accumulate", lambda device: there)
    assert build_config_options(recipe(), generation=HOPPER)["gradient_accumulation_fusion"] is there


@pytest.mark.parametrize(
    ("overrides", "fused"),
    [("model.dtype=bf16", True), ("model.dtype=fp32", False), ("train.deterministic=true", False)],
)
def test_the_loss_is_fused_where_its_gradient_may_be_bf16(overrides, fused):
    chosen = build_config_options(recipe(overrides), generation=HOPPER)
    fusion = chosen["cross_entropy_loss_fusion"]
    assert fusion is fused


def test_fp32_cannot_share_a_sequence(messages):
    shared = recipe(name="qwen3-cp2-packed")
    assert build_config_options(shared, generation=HOPPER)["attention_backend"] is AttnBackend.fused
    with pytest.raises(UsageError, match="unfused") as error:
        build_config_options(recipe("model.dtype=fp32", name="qwen3-cp2-packed"), generation=HOPPER)
    messages(error.value)


@pytest.mark.parametrize("name", ["auto", "fused", "unfused"])
def test_attention_has_megatrons_name(name):
    chosen = build_config_options(recipe(f"model.attention={name}"), generation=HOPPER)
    assert chosen["attention_backend"] is AttnBackend[name]


@pytest.mark.parametrize(
    ("dtype", "asked", "given"),
    [
        ("bf16", "auto", "auto"),
        ("bf16", "fused", "fused"),
        ("fp32", "auto", "unfused"),
        ("fp32", "unfused", "unfused"),
    ],
)
def test_the_run_gets_the_kernel_that_its_plan_names(dtype, asked, given):
    job = recipe(f"model.dtype={dtype}", f"model.attention={asked}")
    assert plan(job, build_preset("h200")).attention.value == given
    assert build_config_options(job, generation=HOPPER)["attention_backend"] is AttnBackend[given]


NARROW = "model.config.v_head_dim=48"
PACKED = ("data.packed=true", "train.micro_batch_size=1")


@pytest.mark.parametrize(
    ("overrides", "generation", "given"),
    [
        (PACKED, "9.0", "fused"),
        (PACKED, "8.0", "auto"),  # not seen there
        ((), "9.0", "auto"),  # rows need no padding
        ((*PACKED, NARROW), "9.0", "auto"),  # equal widths neither
        ((*PACKED, "parallel.cp=2"), "9.0", "auto"),  # not seen
        ((*PACKED, "model.attention=unfused"), "9.0", "unfused"),
    ],
)
def test_narrow_values_of_packs_are_given_to_the_kernel_that_takes_them(overrides, generation, given):
    job = recipe(*overrides)
    assert job.architecture.head_dims == (48, 48 if NARROW in overrides else 32)
    assert build_config_options(job, generation=generation)["attention_backend"] is AttnBackend[given]


@pytest.mark.parametrize(("overrides", "padded"), [(("parallel.cp=1",), False), (("parallel.cp=2",), True)])
def test_values_are_padded_for_the_planned_kernel_only(overrides, padded):
    made = build_plan(recipe(*PACKED, *overrides), hardware_name="h200", mcore="0.16.1")
    (found,) = (decision for decision in made.patches.decisions if decision.id == "mla-thd-value-padding")
    assert made.attention.value == ("auto" if padded else "fused")
    assert found.action is (PatchAction.APPLY if padded else PatchAction.SKIP), found.reason


def test_a_kernel_that_does_not_compute_in_fp32_is_refused(messages):
    with pytest.raises(UsageError, match=r"fused.*fp32") as error:
        build_config_options(recipe("model.attention=fused", "model.dtype=fp32"), generation=HOPPER)
    messages(error.value)


@pytest.mark.parametrize("installed", ["flash_attn", "flash_attn_3"])
def test_flash_attention_is_used_where_it_is_installed(installed, monkeypatch, tmp_path):
    wanted = recipe("model.attention=flash", name="qwen3-tp2-sp")
    record = tmp_path / f"{installed}-2.8.3.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Name: {installed}\nVersion: 2.8.3\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert build_config_options(wanted, generation=HOPPER)["attention_backend"] is AttnBackend.flash


def test_flash_attention_must_be_installed(monkeypatch, tmp_path, messages):
    wanted = recipe("model.attention=flash", name="qwen3-tp2-sp")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(EnvironmentUnfit, match="flash-attn") as error:
        build_config_options(wanted, generation=HOPPER)
    messages(error.value)


def test_fp8_is_named_as_megatron_names_it():
    chosen = build_config_options(recipe("model.fp8.scaling=blockwise"), generation=HOPPER)
    assert (chosen["fp8"], chosen["fp8_recipe"]) == ("e4m3", "blockwise")
    assert "fp8" not in build_config_options(recipe(), generation=HOPPER)


def test_delayed_scaling_looks_back_further_than_one_step():
    chosen = build_config_options(recipe("model.fp8.scaling=delayed"), generation=HOPPER)
    length, algorithm = chosen["fp8_amax_history_len"], chosen["fp8_amax_compute_algo"]
    assert (length, algorithm) == (1024, "max")


def test_fp8_of_another_generation_is_refused(messages):
    with pytest.raises(UsageError, match=r"mxfp8.*10\.0") as error:
        build_config_options(recipe("model.fp8.scaling=mxfp8"), generation=HOPPER)
    messages(error.value)


def test_fp8_that_megatron_lacks_is_refused(monkeypatch, messages):
    monkeypatch.setattr(module, "Fp8Recipe", Enum("Fp8Recipe", "delayed tensorwise"))
    with pytest.raises(EnvironmentUnfit, match=r"blockwise.*tensorwise") as error:
        build_config_options(recipe("model.fp8.scaling=blockwise"), generation=HOPPER)
    messages(error.value)
