"""Published weights become megatron's, bit for bit, on every rank of every layout; what is wrong stops it."""

import json
import math

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from bundle.architectures import from_config
from bundle.architectures.tensors import Tensors
from bundle.environment import packages
from bundle.errors import ExitCode, JobFailed
from bundle.models import loading
from bundle.pretrained import PretrainedWeights, find_weights
from tests.engine.cells import AGREES_WITH_DOUBLES
from tests.families.record import note
from tests.models.trees import Weight, chunk, groups
from tests.reference.configs import CONFIGS
from tests.reference.published import published
from tests.reference.weights import drawn

SEED = 11
LAYOUTS = {"rows": 1, "tp": 2, "pp": 2, "vpp": 2, "tp ep": 2}  # of the record


@pytest.fixture(scope="session")
def directories(tmp_path_factory):
    """A directory for every config of the references, in two files; DeepSeek's with its copies."""
    root = tmp_path_factory.mktemp("published")
    for name, config in CONFIGS.items():
        weights = {key: value.float() for key, value in published(config, drawn(config, SEED)).items()}
        if name == "deepseek_v3":
            weights["model.layers.4.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
            weights["model.layers.4.shared_head.head.weight"] = weights["lm_head.weight"].clone()
        write(root / name, weights)
    return root


def write(directory, weights):
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    names = sorted(weights)
    files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, of in files.items():
        save_file({name: weights[name].contiguous() for name in of}, directory / file)
    index = {"weight_map": {name: file for file, of in files.items() for name in of}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.world
@pytest.mark.parametrize(
    "layout",
    [
        "tp ep",
        "laid out",
        *(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name != "tp ep"),
    ],
)
def test_every_rank_has_its_part_of_every_published_tensor(directories, core, layout, tmp_path):
    if layout not in LAYOUTS and packages.is_base_version_within(core.version, "<0.14"):
        pytest.skip("before 0.14 no MTP layers are laid out")
    ranks, places = LAYOUTS.get(layout, 2), (str(directories), layout, str(tmp_path))
    said = core.world.run("tests.models.loading", ranks, *places, timeout=300)
    for rank in said:
        found = json.loads(rank.splitlines()[-1])
        assert found["compared"] > 100
        assert not found["wrong"]
        predicted = {CONFIGS[name]["model_type"]: far for name, far in found["predicted"].items()}
        dense = set() if "ep" in layout else {"mimo"}  # experts are divided only where there are any
        assert predicted.keys() == {"deepseek_v3", "kimi_k2", "glm4_moe"} | dense
        assert not {family: far for family, far in predicted.items() if not far <= AGREES_WITH_DOUBLES}
        if layout in LAYOUTS:
            note(core.version, f"MTP {layout}", predicted)


@pytest.mark.world
def test_the_biases_of_routers_are_not_rounded(directories, core, tmp_path):
    """They are published in fp32, and one that bf16 rounds sends tokens to other experts."""
    name = "deepseek_v3"
    (said,) = core.world.run(
        "tests.models.rounding", 1, str(directories / name), name, str(tmp_path / "out"), timeout=300
    )
    found = json.loads(said.splitlines()[-1])
    assert found["compared"] > 1 and not found["wrong"]


@pytest.fixture
def alone(tmp_path):
    """One rank of torch's process groups."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


TINY = CONFIGS["qwen2"] | {"num_hidden_layers": 1, "vocab_size": 128}
LAYER = "decoder.layers.0."


def model(config=TINY):
    """A stand-in for megatron's model, of numbers that are none."""
    return chunk({tensor.name: Weight(tensor.shape) for tensor in Tensors(from_config(config))})


def found_in(directory) -> PretrainedWeights:
    found = find_weights(directory)
    assert found is not None
    return found


def loaded(tree, found: PretrainedWeights):
    table = Tensors(from_config(TINY))
    loading.load_and_list_unpublished([tree], groups(), found, table)
    return {name: parameter.detach() for name, parameter in tree.named_parameters()}


def weights():
    return {key: value.detach().float() for key, value in drawn(TINY, SEED).items()}


def test_blocks_of_fp8_are_multiplied_by_their_scale(tmp_path, alone):
    """Blocks that divide nothing evenly; gate and up are two tensors with scales of their own."""
    block, theirs = (24, 20), weights()
    stored, expected = dict(theirs), dict(theirs)
    for name, value in theirs.items():
        if "proj.weight" not in name:
            continue
        rows, columns = value.shape
        scale = torch.rand(math.ceil(rows / block[0]), math.ceil(columns / block[1])) + 0.5
        stored[name] = value.to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale
        wide = torch.kron(scale, torch.ones(block))[:rows, :columns]
        expected[name] = stored[name].float() * wide
    write(tmp_path / "fp8", stored)
    write(tmp_path / "wide", expected)
    quantised = found_in(tmp_path / "fp8")
    ours = loaded(model(), quantised._replace(scale_block=block))
    wide = loaded(model(), found_in(tmp_path / "wide"))
    assert ours.keys() == wide.keys()
    assert all(torch.equal(ours[name], wide[name]) for name in wide)


def test_a_copy_that_differs_is_refused_before_anything_is_filled(tmp_path, alone, messages):
    theirs = weights()
    config = TINY | {"tie_word_embeddings": True}
    head = theirs.pop("lm_head.weight")
    write(tmp_path / "same", theirs | {"lm_head.weight": theirs["model.embed_tokens.weight"].clone()})
    write(tmp_path / "other", theirs | {"lm_head.weight": head})
    table = Tensors(from_config(config))
    tree = model(config)
    loading.load_and_list_unpublished([tree], groups(), found_in(tmp_path / "same"), table)
    tree = model(config)
    with pytest.raises(JobFailed, match="lm_head") as error:
        loading.load_and_list_unpublished([tree], groups(), found_in(tmp_path / "other"), table)
    messages(error.value)
    assert error.value.code is ExitCode.USAGE
    assert all(parameter.isnan().all() for parameter in tree.parameters())


def test_files_that_went_away_meanwhile_fail_the_job(tmp_path, alone, messages):
    write(tmp_path / "model", weights())
    found = found_in(tmp_path / "model")
    (tmp_path / "model" / "model-2.safetensors").unlink()
    with pytest.raises(JobFailed, match=r"model-2\.safetensors") as error:
        loaded(model(), found)
    messages(error.value)


def test_a_file_that_was_replaced_meanwhile_fails_the_job(tmp_path, alone):
    write(tmp_path / "model", weights())
    found = found_in(tmp_path / "model")
    other = {name: value for name, value in weights().items() if "norm" not in name}
    (tmp_path / "model" / "model-1.safetensors").unlink()
    save_file(other, tmp_path / "model" / "model-1.safetensors")
    with pytest.raises(JobFailed, match=r"model-1\.safetensors"):
        loaded(model(), found)


def test_a_parameter_that_the_table_does_not_know_is_named(tmp_path, alone, messages):
    write(tmp_path / "model", weights())
    tree = chunk({f"{LAYER}self_attention.linear_gate.weight": Weight((8, 8))})
    with pytest.raises(JobFailed, match="linear_gate") as error:
        loading.load_and_list_unpublished(
            [tree], groups(), found_in(tmp_path / "model"), Tensors(from_config(TINY))
        )
    messages(error.value)
