"""Adapters of a checkpoint that is written by hand, merged into published weights as PEFT does it."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("megatron.core")
pytest.importorskip("peft")

from bundle.architectures import from_config, read_config
from bundle.errors import UsageError
from bundle.mcore.torch_dist import StackedTensorSlice, TorchDistCheckpoint, write
from bundle.models import conversion
from bundle.models.merging import find_base
from bundle.pretrained.writing import PublishedModel
from bundle.recipe import Recipe, from_mapping
from tests.adapters import reference
from tests.adapters.cases import ALPHA, CASES, RANK
from tests.families import reference as families


def recipe(directory, case) -> Recipe:
    lora = {"rank": RANK, "alpha": ALPHA, "targets": list(case.targets), **case.options}
    return from_mapping(
        {
            "name": "merging",
            "backend": "cpu",
            "model": {"path": str(directory), "dtype": "fp32", "lora": lora, "mtp": {"layers": 0}},
            "data": {"source": "text", "path": ["none"], "tokenizer": "hf:none", "sequence_length": 64},
            "train": {"steps": 1, "global_batch_size": 1},
        }
    )


def checkpoint(root, matrices) -> TorchDistCheckpoint:
    root.mkdir()
    parts = [
        StackedTensorSlice(name, (), (), tuple(value.shape), value.dtype, partial(torch.clone, value))
        for name, value in matrices.items()
    ]
    write(root, parts, (), arguments={}, content_metadata={})
    return TorchDistCheckpoint(root)


@pytest.fixture(scope="module", params=["dense", "some", "experts", "latent", "rsLoRA and DoRA"])
def case(request, tmp_path_factory):
    """A case, its directory with an adapter in it, and what merging is to give, in float64."""
    case, directory = CASES[request.param], tmp_path_factory.mktemp("merging") / "model"
    reference.write(case, directory)
    matrices = reference.adapter(directory / reference.ADAPTER)
    wanted = {name: value.double() for name, value in families.tensors(directory).items()}
    for name, value in wanted.items():
        wanted[name] = reference.merged(name.removesuffix(".weight"), value, matrices, case.scale)
    return case, directory, matrices, wanted


def test_every_weight_is_merged_as_peft_does(case, tmp_path):
    of, directory, matrices, wanted = case
    job = recipe(directory, of)
    saved = checkpoint(tmp_path / "saved", matrices)
    conversion.write_full_hugging_face_model(
        saved, PublishedModel.from_recipe(job), tmp_path / "hf", "fp32", find_base(job)
    )
    written = families.tensors(tmp_path / "hf")
    assert written.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(written[name].double(), value, rtol=1e-5, atol=1e-6, msg=name)
    assert from_config(read_config(tmp_path / "hf")).num_layers == job.architecture.num_layers


def test_greedy_tokens_are_those_of_peft(case, tmp_path):
    """PEFT itself loads the base and the adapter; transformers generates with both."""
    of, directory, matrices, _ = case
    if any("experts." in name for name in matrices):
        pytest.skip("beside stacked experts PEFT loads a part of the adapter")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from bundle.models.generation import GenerationOptions, generate_answers
    from bundle.packing.prompts import Prompt

    job = recipe(directory, of)
    saved = checkpoint(tmp_path / "saved", matrices)
    conversion.write_full_hugging_face_model(
        saved, PublishedModel.from_recipe(job), tmp_path / "hf", "fp32", find_base(job)
    )
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, directory / reference.ADAPTER).eval()
    prompts = torch.tensor([[3, 8, 20, 1], [70, 9, 101, 44]])
    shown: list[int] = []
    found = list(
        generate_answers(
            tmp_path / "hf",
            [Prompt(ids.tolist()) for ids in prompts],
            [202],
            GenerationOptions(12),
            shown.append,
        )
    )
    for ids, answer in zip(prompts, found, strict=True):
        settings = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": 202, "pad_token_id": 202}
        whole = adapted.generate(input_ids=ids[None], attention_mask=torch.ones_like(ids[None]), **settings)
        assert answer == whole[0, len(ids) :].tolist()
    assert shown == [token for answer in found for token in answer]


def test_matrices_that_are_missing_or_of_another_shape_are_named(case, tmp_path):
    of, directory, matrices, _ = case
    job = recipe(directory, of)
    first, second, *_ = sorted(matrices)
    others = {name: value for name, value in matrices.items() if name != first}
    saved = checkpoint(tmp_path / "saved", others | {second: torch.zeros(2, 2)})
    with pytest.raises(UsageError) as error:
        conversion.write_full_hugging_face_model(
            saved, PublishedModel.from_recipe(job), tmp_path / "hf", "fp32", find_base(job)
        )
    assert {line.split()[0] for line in error.value.violations} == {first, second}
    assert not (tmp_path / "hf").exists()


def test_weights_that_are_not_finite_are_named(case, tmp_path):
    of, directory, matrices, _ = case
    name = "model.layers.0.self_attn.o_proj.weight"
    (file,) = (path for path in directory.glob("model*.safetensors") if name in load_file(path))
    before, weights = file.read_bytes(), load_file(file)
    weights[name] = weights[name].clone()
    weights[name][0, 0] = torch.nan
    save_file(weights, file, {"format": "pt"})
    try:
        job = recipe(directory, of)
        saved = checkpoint(tmp_path / "saved", matrices)
        with pytest.raises(UsageError) as error:
            conversion.write_full_hugging_face_model(
                saved, PublishedModel.from_recipe(job), tmp_path / "hf", "fp32", find_base(job)
            )
        assert name in error.value.violations[0] and not (tmp_path / "hf").exists()
    finally:
        file.write_bytes(before)


def test_random_weights_are_not_merged(case):
    of, directory, *_ = case
    job = recipe(directory, of)
    with pytest.raises(UsageError, match=r"model\.lora"):
        find_base(job.model_copy(update={"model": job.model.model_copy(update={"weights": "random"})}))
