"""The tables of what the backends can do, against the facts they were made from."""

from typing import Any

import pytest

from bundle import capabilities
from bundle.capabilities import Capabilities
from bundle.capabilities.ascend import ASCEND
from bundle.capabilities.cpu import CPU
from bundle.capabilities.cuda import CUDA
from bundle.environment.hardware import PRESET_NAMES, build_preset
from bundle.fp8 import SCALINGS
from tests.planning.jobs import DEEPSEEK, QWEN3, job

BACKENDS = (CPU, CUDA, ASCEND)
HARDWARE_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.mark.parametrize("named", [name for name in PRESET_NAMES if build_preset(name).backend == "cuda"])
def test_the_rate_of_every_gpu_that_can_be_named_is_known(named):
    peak = CUDA.find_bf16_peak(build_preset(named).devices[0].name)
    assert peak is not None and 1e14 < peak.bf16 < 1e16 and peak.source
    assert 1e12 < peak.memory_bandwidth < 1e13


@pytest.mark.parametrize("device", ["NVIDIA H200 NVL", "NVIDIA H100 PCIe", "NVIDIA", ""])
def test_the_rate_of_a_device_of_another_name_is_not_guessed(device):
    assert CUDA.find_bf16_peak(device) is None and CPU.find_bf16_peak(device) is None


def refusal(backend: Capabilities, scaling: Any, format: Any, generation: str | None) -> str:
    return backend.explain_fp8_refusal(scaling, format, generation) or "none"


@pytest.mark.parametrize(
    ("scaling", "runs", "not_"),
    [
        ("delayed", ("8.9", "9.0", "10.0", "12.0"), ("8.0", "8.6", "7.5")),
        ("tensorwise", ("8.9", "9.0"), ("8.0",)),
        ("blockwise", ("9.0", "10.0"), ("8.9",)),
        ("mxfp8", ("10.0", "10.3"), ("9.0", "12.0", "8.9")),
    ],
)
def test_fp8_by_compute_capability(scaling, runs, not_):
    assert [CUDA.explain_fp8_refusal(scaling, "e4m3", capability) for capability in runs] == [None] * len(
        runs
    )
    for capability in not_:
        assert f"this device is {capability}" in refusal(CUDA, scaling, "hybrid", capability)
    assert CUDA.explain_fp8_refusal(scaling, "e4m3", None) is None


def test_there_is_no_fp8_on_ascend_and_a_cpu_has_all_of_it(messages):
    for generation in ("a3", "a5", None):
        no_fp8 = refusal(ASCEND, "mxfp8", "e4m3", generation)
        assert "backend_options.mindspeed" in no_fp8
        messages(no_fp8)
    for scaling in SCALINGS:
        assert CPU.explain_fp8_refusal(scaling, "hybrid", "x86_64") is None
    assert "nvfp4" in refusal(CUDA, "nvfp4", "e4m3", "10.0")
    assert "e5m2" in refusal(CUDA, "mxfp8", "e5m2", "10.0")


@pytest.mark.parametrize(
    ("backend", "name", "case", "value"),
    [
        (CUDA, "flash", ("thd", "causal", 192, 128), "thd"),
        (CUDA, "flash", ("thd", "causal", 128, 128), None),
        (CUDA, "flash", ("bshd", "causal", 192, 128), "bshd"),
        (CPU, "flash", ("bshd", "causal", 192, 128), "bshd"),
        (CUDA, "fused", ("thd", "padding_causal", 192, 128), None),
        (CUDA, "fused", ("thd", "causal", 576, 512), "256"),
        (CUDA, "unfused", ("thd", "causal", 576, 512), None),
        (CUDA, "flash", ("bshd", "arbitrary", 64, 64), "arbitrary"),
        (CUDA, "flash", ("thd", "causal", 192, 128), "thd"),
        (CPU, "auto", ("thd", "causal", 192, 128), None),
        (CPU, "flash", ("thd", "causal", 192, 128), "thd"),
        (ASCEND, "auto", ("thd", "causal", 192, 128), None),
        (ASCEND, "flash", ("thd", "causal", 64, 128), "keys"),
        (ASCEND, "flash", ("bshd", "padding", 64, 64), None),
        (ASCEND, "unfused", ("thd", "causal", 64, 64), "thd"),
    ],
)
def test_attention_kernels_refuse_what_they_do_not_take(backend, name, case, value, messages):
    layout, mask, qk, v = case
    reasons = backend.find_kernel(name).list_shape_refusals(
        layout=layout, mask=mask, qk_head_dim=qk, v_head_dim=v
    )
    assert bool(reasons) == (value is not None)
    if value is not None:
        assert value in reasons[0]
        messages("\n".join(reasons))


MLA = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
WIDE = QWEN3 | {"head_dim": 256}


@pytest.mark.parametrize(
    ("generation", "config", "sections", "kernel", "value"),
    [
        ("8.0", QWEN3, {"data": {"packed": True}}, "flash", None),
        ("9.0", QWEN3, {"data": {"packed": True}, "parallel": {"cp": 2}}, "flash", "padding"),
        ("9.0", QWEN3, {"data": {"packed": True}, "parallel": {"cp": 2}}, "auto", None),
        ("8.0", QWEN3, {"data": {"packed": True}, "parallel": {"cp": 2}}, "auto", "9.0"),
        ("8.0", QWEN3, {"data": {"packed": True}}, "fused", "9.0"),
        ("8.9", QWEN3, {"parallel": {"cp": 2}}, "fused", None),
        (None, QWEN3, {"data": {"packed": True}}, "fused", None),
        ("8.0", WIDE, {}, "fused", "128"),
        ("10.0", WIDE, {}, "fused", "256 and 256"),
        ("9.0", WIDE, {}, "fused", None),
        ("10.0", DEEPSEEK | MLA, {}, "fused", None),
        ("10.0", DEEPSEEK | MLA | {"v_head_dim": 160}, {}, "fused", "192 and 160"),
        ("8.0", DEEPSEEK | MLA, {}, "fused", "192 and 128"),
    ],
)
def test_kernels_of_a_gpu_are_those_of_its_generation(generation, config, sections, kernel, value, messages):
    recipe = job(
        config, backend="cuda", model={"config": config, "dtype": "bf16", "attention": kernel}, **sections
    )
    reasons = CUDA.list_requested_kernel_refusals(recipe, generation)
    assert any(value in reason for reason in reasons) if value else not reasons
    if reasons:
        messages("\n".join(reasons))


def test_latent_attention_of_an_a100_is_unfused_and_counted_so():
    rows = {"data": {"packed": False}}
    recipe = job(DEEPSEEK | MLA, model={"config": DEEPSEEK | MLA, "dtype": "bf16"}, **rows)
    for generation, kernel in (("8.0", "unfused"), ("9.0", "auto")):
        assert CUDA.choose_attention(recipe, generation).value == kernel
        assert CUDA.choose_layer_traits(recipe, generation).keeps_scores is (kernel == "unfused")


def test_all_reasons_come_at_once():
    reasons = CUDA.find_kernel("flash").list_shape_refusals(
        layout="thd", mask="arbitrary", qk_head_dim=512, v_head_dim=128
    )
    assert len(reasons) == 3


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.backend)
def test_tables_are_complete(backend):
    assert {(m.model, m.layout) for m in backend.masks} == {
        (m, x) for m in ("text", "vlm") for x in ("thd", "bshd")
    }
    assert len(backend.masks) == 4 and all(mask.reason for mask in backend.masks)
    # The engine gives text models no mask, on every backend.
    assert {backend.find_mask("text", layout).form for layout in ("thd", "bshd")} == {"none"}
    names = [variable.name for variable in backend.environment]
    assert HARDWARE_QUEUES in names
    assert all(variable.reason and isinstance(variable.value, str) for variable in backend.environment)
    kernels = {kernel.name for kernel in backend.kernels}
    assert backend.auto_attention.value in ({"auto"} if backend is CUDA else kernels)
    assert {option.name for option in backend.fp8} == (set() if backend.no_fp8_reason else set(SCALINGS))


def test_variables_follow_the_features():
    plain, rl = (
        {variable.name for variable in CUDA.list_variables(features)}
        for features in (frozenset(), frozenset({"rl", "moe"}))
    )
    assert rl - plain == {"NCCL_CUMEM_ENABLE", "NVTE_USE_CUTLASS_GROUPED_GEMM"}


@pytest.mark.parametrize(("generation", "is_set"), [("8.0", False), ("9.0", True), ("10.0", False)])
def test_all_experts_share_a_launch_on_hopper(generation, is_set):
    variables = CUDA.list_variables(frozenset({"moe"}), generation=generation)
    assert ("NVTE_USE_CUTLASS_GROUPED_GEMM" in {variable.name for variable in variables}) is is_set


@pytest.mark.parametrize(
    ("can", "values"),
    [
        (
            CUDA,
            {
                "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
                "NCCL_ALGO": "Ring",
            },
        ),
        (ASCEND, {"HCCL_DETERMINISTIC": "true", "CLOSE_MATMUL_K_SHIFT": "1"}),
    ],
    ids=["cuda", "ascend"],
)
def test_variables_of_deterministic_runs(can, values):
    plain, deterministic = (
        {variable.name: variable.value for variable in can.list_variables(features)}
        for features in (frozenset(), job(QWEN3, train={"deterministic": True}).features)
    )
    assert {name: value for name, value in deterministic.items() if name not in plain} == values


@pytest.mark.parametrize(
    ("backend", "generation", "kubernetes", "slurm", "ray"),
    [
        ("cuda", "9.0", "nvidia.com/gpu", "gpus-per-node={}", "GPU"),
        ("ascend", "a2", "huawei.com/Ascend910", "gres=npu:{}", "NPU"),
        ("ascend", "", "huawei.com/Ascend910", "gres=npu:{}", "NPU"),
        ("ascend", "a5", "huawei.com/npu", "gres=npu:{}", "NPU"),
    ],
)
def test_schedulers_have_a_name_for_a_device(backend, generation, kubernetes, slurm, ray):
    found = capabilities.find_capabilities(backend).find_resource(generation)
    assert found is not None and found[:3] == (kubernetes, slurm, ray)


@pytest.mark.parametrize(
    ("features", "generation", "value"),
    [
        ((), "9.0", "8"),
        (("sp",), "9.0", "8"),
        (("tp", "sp"), "9.0", "1"),
        (("cp",), "8.0", "1"),
        (("tp",), "10.0", "8"),
        (("cp",), None, "1"),  # a device that nobody knows
    ],
)
def test_one_hardware_queue_is_for_tp_and_cp_before_blackwell(features, generation, value):
    made = {v.name: v.value for v in CUDA.list_variables(frozenset(features), generation=generation)}
    assert made[HARDWARE_QUEUES] == value


@pytest.mark.parametrize(
    ("backend", "cores_per_rank", "threads"),
    [
        (CUDA, 16.0, "8"),
        (CUDA, 5.9, "5"),
        (CUDA, 0.5, "1"),
        (CUDA, None, "8"),
        (ASCEND, 3.0, "3"),
        (CPU, 16.0, "1"),
    ],
)
def test_threads_are_cores_by_ranks_on_accelerators(backend, cores_per_rank, threads):
    (found,) = (
        v
        for v in backend.list_variables(frozenset(), cores_per_rank=cores_per_rank)
        if v.name == "OMP_NUM_THREADS"
    )
    assert found.value == threads and found.is_overridable


def test_no_scheduler_counts_cpus_as_devices():
    assert capabilities.find_capabilities("cpu").find_resource("") is None


def test_variables_follow_the_nodes_and_what_the_recipe_says(messages):
    def values(nodes: int, **said: str | None) -> dict[str, str]:
        return {v.name: v.value for v in ASCEND.list_variables(frozenset(), nodes, said)}

    one, two = values(1), values(2)
    assert one["GLOO_SOCKET_IFNAME"] == "lo" and "GLOO_SOCKET_IFNAME" not in two
    assert one | two == one and two["OMP_NUM_THREADS"] == "8"
    changed = values(2, HCCL_BUFFSIZE="300", OMP_NUM_THREADS="4", CPU_AFFINITY_CONF=None)
    assert changed == {
        name: value for name, value in two.items() if name not in ("OMP_NUM_THREADS", "CPU_AFFINITY_CONF")
    } | {"HCCL_BUFFSIZE": "300", "OMP_NUM_THREADS": "4"}
    (why,) = (
        v.reason for v in ASCEND.list_variables(frozenset(), 2, {"OMP_NUM_THREADS": "4"}) if v.value == "4"
    )
    assert "'8'" in why
    messages(why)


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"HCCL_EVENT_TIMEOUT": "3600"}, "HCCL_EVENT_TIMEOUT"),
        ({"HCCL_EXEC_TIMEOUT": "1800"}, ""),
        ({"HCCL_EVENT_TIMEOUT": None}, ""),
        ({"ASCEND_LAUNCH_BLOCKING": "1", "TASK_QUEUE_ENABLE": "2"}, "TASK_QUEUE_ENABLE"),
        ({"ASCEND_LAUNCH_BLOCKING": "1", "TASK_QUEUE_ENABLE": "0"}, ""),
        (
            dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF"), "expandable_segments:True"),
            "PYTORCH_NPU_ALLOC_CONF",
        ),
    ],
)
def test_values_that_do_not_go_together_are_named(said, name, messages):
    made = {v.name: v.value for v in ASCEND.list_variables(frozenset(), 1, said)}
    found = ASCEND.list_conflicts(made)
    assert len(found) == bool(name) and all(name in conflict for conflict in found)
    assert not CUDA.list_conflicts(made)
    if found:
        messages(found[0])
