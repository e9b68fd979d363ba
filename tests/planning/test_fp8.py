"""FP8 is refused in a plan where a rank's part of a weight is no multiple of what its products take."""

import pytest

from bundle.environment.hardware import build_preset, detect
from bundle.errors import ExitCode
from tests.environment.machines import recorded
from tests.planning.jobs import DEEPSEEK, QWEN3, job, plan

# DEEPSEEK's sizes are odd on purpose; these are multiples of 32 on one rank.
EVEN = DEEPSEEK | {
    "moe_intermediate_size": 32,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 32,
    "v_head_dim": 16,
}
QUANTIZED_LAYERS = {
    *("linear_proj", "linear_fc1", "linear_fc2", "eh_proj"),
    *("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"),
}


def refused(config, machine, fp8, **parallel):
    """(weight, its shape) of every refusal of the sizes."""
    world = parallel.get("tp", 1) * parallel.get("pp", 1)
    recipe = job(
        config,
        model={"config": config, "fp8": fp8 and {"scaling": fp8}},
        parallel=parallel,
        train={"global_batch_size": 16},
    )
    hardware = detect("cpu", recorded("cgroup-v1")) if machine == "cpu" else build_preset(machine)
    made = plan(recipe, hardware, nodes=1, per_node=world)
    found = [p for p in made.problems if "on each rank" in p.text]
    assert all(p.code is ExitCode.USAGE and p.text.startswith("model.fp8: ") for p in found)
    return [p.text.partition("on each rank ")[2].partition(" (")[0] for p in found]


@pytest.mark.parametrize("machine", ["cpu", "b200", "a3"])
@pytest.mark.parametrize(
    ("config", "scaling", "parallel", "wrong"),
    [
        (QWEN3, "blockwise", {}, []),
        (QWEN3, "blockwise", {"tp": 2}, []),
        (QWEN3 | {"intermediate_size": 104}, None, {"tp": 2}, []),
        (
            QWEN3 | {"intermediate_size": 104},
            "delayed",
            {"tp": 2},
            [
                "decoder.layers.mlp.linear_fc1.weight is [104, 64]",
                "decoder.layers.mlp.linear_fc2.weight is [64, 52]",
            ],
        ),
        (QWEN3, "mxfp8", {"tp": 2}, ["decoder.layers.mlp.linear_fc2.weight is [64, 48]"]),
        (EVEN, "mxfp8", {}, []),
        (EVEN, "mxfp8", {"pp": 2}, []),
    ],
)
def test_each_backend_refuses_the_same_sizes(machine, config, scaling, parallel, wrong):
    assert refused(config, machine, scaling, **parallel) == wrong


def test_latent_attention_experts_and_mtp_layers_are_looked_at():
    names = refused(DEEPSEEK | {"hidden_size": 68}, "cpu", "tensorwise")
    ends = {name.partition(" is ")[0].removesuffix(".weight").rpartition(".")[2] for name in names}
    assert ends == QUANTIZED_LAYERS
    assert any(".experts." in name for name in names) and any(".shared_experts." in name for name in names)
    assert not any("router" in name or "embedding" in name or "output_layer" in name for name in names)
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("scaling", "length", "rows", "parallel", "packed", "multiple"),
    [
        ("blockwise", 40, 2, {}, False, None),
        ("blockwise", 40, 1, {}, False, 16),
        ("blockwise", 40, 1, {}, True, None),
        ("mxfp8", 40, 2, {}, False, 32),
        ("delayed", 48, 1, {"cp": 2}, False, 32),
        ("delayed", 48, 2, {"cp": 2}, False, None),
        ("tensorwise", 48, 1, {"tp": 2}, False, 32),
        ("tensorwise", 48, 1, {"tp": 2, "sequence_parallel": False}, False, None),
        (None, 40, 1, {}, False, None),
    ],
)
def test_rows_of_equal_length_fill_the_products_of_every_rank(
    scaling, length, rows, parallel, packed, multiple, messages
):
    recipe = job(
        QWEN3,
        model={"config": QWEN3, "fp8": scaling and {"scaling": scaling}},
        parallel=parallel,
        data={"sequence_length": length, "packed": packed},
        train={"micro_batch_size": rows, "global_batch_size": 16},
    )
    hardware = detect("cpu", recorded("cgroup-v1"))
    made = plan(recipe, hardware)
    assert len(made.problems) == (multiple is not None)
    for problem in made.problems:
        assert problem.text.startswith("data.sequence_length") and scaling in problem.text
        assert f"{rows} x {length}" in problem.text and f" {multiple}" in problem.text
        messages(problem.text)
