"""Tiny models on emulated NPUs, against the same layouts on the cpu."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from bundle.environment.compatibility import EMULATED_ACCELERATOR
from tests.npu.training import CASES, Case
from tests.world import World

pytestmark = pytest.mark.npu

SAME, BF16 = 1e-6, 5e-4  # relative


@pytest.fixture(scope="session")
def seen(both):
    """The cases that this megatron-core trains, and both backends' answers."""
    cases = [case for case in CASES if trains(both.version, case)]
    return both, cases, trained(cases, both.npu), trained(cases, both.cpu)


def trains(version: str, case: Case) -> bool:
    """Whether it does: 0.12 trains MTP neither under tp2 (the trap mtp-tensor-parallel) nor in packs."""
    mtp = case.recipe().architecture.mtp_layers
    return not (version.startswith("0.12.") and mtp and (case.packed or "tp" in case.parallel))


def trained(cases: Sequence[Case], world: World) -> dict[str, Any]:
    """What the cases come to, each on as many ranks as it wants."""
    answer: dict[str, Any] = {"losses": {}, "operators": {}}
    for ranks in (1, 2):
        own = [case.name for case in cases if case.ranks == ranks]
        out = world.run("tests.npu.training", ranks, *own, timeout=1800)
        for part, found in json.loads(out[0].splitlines()[-1]).items():
            answer[part] |= found
    return answer


def compare(names: Iterable[str], npu: Any, cpu: Any) -> None:
    """The losses and gradient norms of every step are the cpu's."""
    for name in names:
        bound = BF16 if "bf16" in name else SAME
        for ours, theirs in zip(npu["losses"][name], cpu["losses"][name], strict=True):
            assert ours == pytest.approx(theirs, rel=bound), name


def test_losses_and_gradient_norms_are_the_cpus(seen, proven):
    both, cases, npu, cpu = seen
    compare((case.name for case in cases), npu, cpu)
    core = None if both.npu.tree is None else both.version
    proven(
        "tiny models train with the losses of the cpu",
        core=core,
        backend="ascend",
        device=EMULATED_ACCELERATOR,
    )


def test_the_operators_of_torch_npu_were_called_where_they_were_asked_for(seen):
    _, cases, npu, cpu = seen
    assert not any(cpu["operators"].values())
    everywhere = {
        f"npu_{name}{end}" for name in ("swiglu", "rms_norm", "rotary_mul") for end in ("", "_backward")
    }
    everywhere.add("_fused_adamw_")
    permuted = ("npu_moe_token_permute_with_routing_map", "npu_moe_token_unpermute_with_routing_map")
    experts = {"npu_grouped_matmul", permuted[0], f"_{permuted[1]}", *(f"{name}_grad" for name in permuted)}
    attention = {"npu_fusion_attention", "npu_fusion_attention_grad"}
    for case in cases:
        asked = case.options.get("operators") != []
        wanted = everywhere | (experts if case.model == "latent" else set()) if asked else set()
        wanted |= attention if case.options.get("attention") != "unfused" else set()
        assert set(npu["operators"][case.name]) == wanted, case.name


def test_ranks_that_divide_tensors_divide_the_sequence_too():
    divided = [case.recipe().parallel for case in CASES if case.parallel.get("tp", 1) > 1]
    assert divided and all(layout.sequence_parallel for layout in divided)
