"""The learning rate of every step: a straight warm-up, then down to the lowest one at the last step."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")
from bundle.recipe import from_mapping

pytestmark = pytest.mark.usefixtures("megatron")


def rates(steps: int, resumed_at: int | None = None, **optimizer: Any) -> list[float]:
    """The rate that each optimizer step takes."""
    from bundle.mcore.optimization import build_scheduler

    recipe = from_mapping(
        {
            "name": "rates",
            "model": {"config": _TINY},
            "data": {"source": "text", "path": ["none"], "sequence_length": 8},
            "train": {"steps": steps, "global_batch_size": 1},
            "optimizer": {"lr": 0.4, "min_lr": 0.1, **optimizer},
        }
    )
    of = SimpleNamespace(param_groups=[{"lr": math.nan}])
    scheduler = build_scheduler(recipe, of)
    found = []
    for step in range(steps):
        if step == resumed_at:
            saved = scheduler.state_dict()
            of.param_groups[0]["lr"] = math.nan
            scheduler = build_scheduler(recipe, of)
            scheduler.load_state_dict(saved)
        found.append(of.param_groups[0]["lr"])
        scheduler.step(increment=1)
    return found


_TINY = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 258,
    "max_position_embeddings": 8,
}


@pytest.mark.parametrize("resumed_at", [None, 1, 4])
def test_linear(resumed_at):
    seen = rates(7, resumed_at, warmup_steps=4, schedule="linear")
    assert seen == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.3, 0.2, 0.1])


def test_cosine():
    seen = rates(5, warmup_steps=1, schedule="cosine")
    assert seen == pytest.approx([0.4, 0.25 + 0.15 * math.sqrt(0.5), 0.25, 0.25 - 0.15 * math.sqrt(0.5), 0.1])


def test_without_warm_up_the_first_step_has_the_highest_rate():
    assert rates(3, warmup_steps=0, schedule="linear") == pytest.approx([0.4, 0.25, 0.1])


def test_constant():
    assert rates(4, warmup_steps=2, schedule="constant") == pytest.approx([0.2, 0.4, 0.4, 0.4])


@pytest.mark.parametrize("warmup_steps", [0, 1, 2, 10])
@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root", "WSD"])
def test_rates_are_megatrons_own(style, warmup_steps):
    """Step n takes what megatron has after n steps; a square root after n - 1, when the warm-up is over.

    In the first step after it both are the highest rate.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    steps, of = 40, SimpleNamespace(param_groups=[{"lr": math.nan}])
    wsd: dict[str, Any] = {"wsd_decay_steps": 12, "wsd_decay_style": "cosine"} if style == "WSD" else {}
    oracle = OptimizerParamScheduler(
        of,
        init_lr=0.0,
        max_lr=0.4,
        min_lr=0.1,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=steps,
        lr_decay_style=style,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=steps,
        wd_incr_style="constant",
        wsd_decay_steps=wsd.get("wsd_decay_steps"),
        lr_wsd_decay_style=wsd.get("wsd_decay_style"),
    )
    taken = []
    for _ in range(steps + 1):
        taken.append(of.param_groups[0]["lr"])
        oracle.step(increment=1)
    after = taken[warmup_steps:-1] if style == "inverse-square-root" else taken[warmup_steps + 1 :]
    wanted = taken[1 : warmup_steps + 1] + after
    if warmup_steps == 0 and style != "inverse-square-root":
        # Without a warm-up we begin at the highest rate, as megatron does, and end at the lowest, as it does.
        oracle.num_steps, oracle.lr_decay_steps = 0, steps - 1
        wanted = []
        for _ in range(steps):
            wanted.append(oracle.get_lr({}))
            oracle.step(increment=1)
    assert rates(steps, warmup_steps=warmup_steps, schedule=style, **wsd) == pytest.approx(wanted)


def test_inverse_square_root_goes_on_after_a_resume_and_not_below_the_lowest():
    seen = rates(90, 7, warmup_steps=5, schedule="inverse-square-root")
    assert seen == rates(90, warmup_steps=5, schedule="inverse-square-root")
    assert seen[5:8] == pytest.approx([0.4, 0.4 * math.sqrt(5 / 6), 0.4 * math.sqrt(5 / 7)])
    assert seen[79:82] == pytest.approx([0.4 * math.sqrt(5 / 79), 0.1, 0.1], rel=1e-3)
    assert seen[82:] == pytest.approx([0.1] * 8)


FALLEN = {  # megatron's own names -> what is left of the way down, by the part of the decay that is done
    "linear": lambda done: 1 - done,
    "cosine": lambda done: math.cos(math.pi * done / 2) ** 2,
    "exponential": lambda done: 2 ** (1 - done) - 1,
}


@pytest.mark.parametrize("resumed_at", [None, 6])
@pytest.mark.parametrize("style", [*FALLEN, None])
def test_wsd_is_stable_until_its_last_steps(style, resumed_at):
    given = {} if style is None else {"wsd_decay_style": style}
    seen = rates(9, resumed_at, warmup_steps=2, schedule="WSD", wsd_decay_steps=4, **given)
    left = [FALLEN[style or "exponential"](done / 4) for done in (1, 2, 3, 4)]
    assert seen == pytest.approx([0.2, 0.4, 0.4, 0.4, 0.4, *(0.1 + 0.3 * part for part in left)])


def test_wsd_may_fall_from_the_first_step_after_the_warm_up():
    seen = rates(5, warmup_steps=1, schedule="WSD", wsd_decay_steps=4, wsd_decay_style="linear")
    assert seen == pytest.approx([0.4, 0.325, 0.25, 0.175, 0.1])


def test_a_single_step_learns():
    assert rates(1, warmup_steps=0, schedule="linear") == pytest.approx([0.4])


def test_a_fused_adam_is_adam_and_leaves_no_trace_in_what_is_saved():
    """The kernel is taken in every step, after a state of a run without it was loaded too."""
    import torch

    from bundle.mcore.optimization import fuse_adam

    def trained(fused: bool) -> Any:
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 6))
        inner = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.1)
        kernels = []
        inner.register_step_pre_hook(lambda *_: kernels.append(inner.param_groups[0]["fused"]))
        if fused:
            fuse_adam(SimpleNamespace(optimizer=inner))  # type: ignore[arg-type]
        inner.register_step_pre_hook(lambda *_: kernels.append(inner.param_groups[0]["fused"]))
        for step in range(3):
            parameter.grad = torch.sin(parameter.detach() * (step + 1))
            inner.step()
            inner.load_state_dict(inner.state_dict())
        return parameter.detach(), inner.state_dict(), kernels

    (one, state, kernels), (other, plain, _) = trained(True), trained(False)
    torch.testing.assert_close(one, other)
    assert kernels == [None, True] * 3
    assert state["param_groups"] == plain["param_groups"]
    assert state["state"][0]["step"] == plain["state"][0]["step"] == 3
