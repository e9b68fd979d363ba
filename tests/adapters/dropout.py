"""What dropout of adapters does on real ranks: which of them drop the same values, and PEFT's numbers.

python -m tests.adapters.dropout prints an object on rank 0: layout -> what `measure` returns, and PEFT -> the
largest distance from PEFT's output and gradients with the same random state.
"""

import types
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from bundle.recipe import load
from tests import world
from tests.planning.megatron import plan_needed_patches
from tests.planning.rank import micro_batches
from tests.ranks import finish_rank, start_rank

PEFT = "peft"
_LORA = "model.lora={rank: 4, alpha: 8, targets: all-linear, dropout: 0.5}"
_EXPERTS = ("demo", "parallel.ep=1", "parallel.tp=2", "parallel.etp=2", "model.mtp.layers=0")
LAYOUTS = {
    "tp2": ("qwen3-tp2-sp", "parallel.sequence_parallel=false"),
    "tp2 and sequence parallel": ("qwen3-tp2-sp",),
    "etp2": _EXPERTS,
}
SAME = {  # by (expert, the dimension of the weight that is cut): whether both ranks drop the same values
    "tp2": {"False 0": True, "False 1": False},
    "tp2 and sequence parallel": {"False 0": False, "False 1": False},
    "etp2": {"False None": False, "False 0": False, "False 1": False, "True 0": True, "True 1": False},
}


def main() -> None:
    runtime, rank = start_rank(plan_needed_patches())
    found: dict[str, Any] = world.each(LAYOUTS.items(), lambda names: measure(names, runtime))
    with runtime.megatron_calls():
        found[PEFT] = compare_with_peft()
    finish_rank(found, rank)


def measure(names: tuple[str, ...], runtime: Any) -> dict[str, Any]:
    """Return which kinds of layers drop the same values on both ranks, and what else must hold."""
    name, *overrides = names
    masks, gradients = train(name, [*overrides, _LORA], runtime)
    again, recomputed = train(name, [*overrides, _LORA, "model.recompute={granularity: full}"], runtime)
    whole = [gradient for gradient, is_whole in gradients if is_whole]
    other = [each.clone() for each in whole]
    for each in other:
        dist.broadcast(each, 0)
    assert whole
    assert len(again) > len(masks)  # masks are drawn twice
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, masks)
    same: dict[str, set[bool]] = {}
    for (kind, ours), (_, theirs) in zip(*gathered, strict=True):
        same.setdefault(kind, set()).add(torch.equal(ours, theirs))
    return {
        "same": {kind: sorted(equal) for kind, equal in same.items()},
        "whole gradients are equal": all(map(torch.equal, whole, other)),
        "recomputed gradients are equal": all(
            torch.equal(one, two) for (one, _), (two, _) in zip(gradients, recomputed, strict=True)
        ),
        "masks are different": len({str(mask.flatten()[:64].tolist()) for _, mask in masks}) == len(masks),
    }


def train(name: str, overrides: list[str], runtime: Any) -> tuple[list[Any], list[Any]]:
    """Return the kind and mask of every dropout of a step, and the gradients with whether they are whole."""
    from bundle.engine import Engine
    from bundle.mcore import adapters as mcore
    from bundle.mcore import groups
    from bundle.models import adapters
    from tests.engine.experiments import gather_gradients

    recipe = load(name, overrides)
    with runtime.megatron_calls():
        state = groups.create_model_parallel_groups(recipe.parallel, seed=recipe.seed, timeout_seconds=60)
    engine = Engine(recipe, runtime, state, torch.device("cpu"))
    matrices = list(adapters.list_matrices(engine.models))
    with torch.no_grad():
        for named in matrices:
            named.parameter.add_(0.01)  # B is zero
    torch.manual_seed(1)  # of the tokens
    batches = micro_batches(recipe, state)
    current, masks = [""], []

    def drop(x: torch.Tensor, share: float) -> torch.Tensor:
        out = F.dropout(x, share)
        masks.append((current[0], out.detach() != 0))
        return out

    for module in engine.models[0].modules():
        if isinstance(module, mcore.LowRankDelta):
            kind = f"{module._is_expert} {module._dim}"
            module.register_forward_pre_hook(lambda *_, kind=kind: current.__setitem__(0, kind))
    vars(mcore)["F"] = types.SimpleNamespace(**vars(F) | {"dropout": drop})
    before = engine.compute_log_probs(batches[:1])[0].log_probs
    assert not masks, "values are dropped in evaluation"
    engine.forward_backward(batches)
    count = len(masks)
    assert torch.equal(engine.compute_log_probs(batches[:1])[0].log_probs, before)
    assert len(masks) == count
    vars(mcore)["F"] = F
    gather_gradients(engine)
    gradients = [(named.parameter.main_grad.clone(), named.shard is None) for named in matrices]
    groups.destroy_model_parallel_groups()
    return masks, gradients


def compare_with_peft() -> float:
    """Return the distance from PEFT, of a layer that joins two published weights."""
    from megatron.core import tensor_parallel
    from peft import LoraConfig, get_peft_model

    from bundle.mcore import groups
    from bundle.mcore.adapters import LowRankDelta, LowRankPair
    from bundle.recipe import Parallel

    groups.create_model_parallel_groups(Parallel(), seed=1, timeout_seconds=60)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    torch.manual_seed(5)
    base = torch.nn.ModuleDict(
        {"q": torch.nn.Linear(8, 6, bias=False), "k": torch.nn.Linear(8, 4, bias=False)}
    )
    model = get_peft_model(
        base,
        LoraConfig(r=3, lora_alpha=6, lora_dropout=0.3, target_modules=["q", "k"], init_lora_weights=False),
    ).train()
    layers = [model.base_model.model[name] for name in "qk"]
    x, weight = torch.randn(5, 2, 8), torch.randn(5, 2, 10)
    pairs = [
        LowRankPair(
            *(
                torch.nn.Parameter(getattr(layer, f"lora_{m}")["default"].weight.detach().clone())
                for m in "AB"
            )
        )
        for layer in layers
    ]
    ours = LowRankDelta(
        [pairs], [], (6, 4), 1, scale=2.0, dropout=0.3, dim=None, group=dist.group.WORLD, is_expert=False,
        sequence_parallel=False,
    )  # fmt: skip
    tracker.states_["data-parallel-rng"] = torch.get_rng_state()
    wanted = torch.cat([layer(x) - layer.base_layer(x) for layer in layers], -1)
    (wanted * weight).sum().backward()
    seen = ours(torch.zeros(5, 2, 10), None, x)
    (seen * weight).sum().backward()
    gaps = [seen - wanted]
    for layer, pair in zip(layers, pairs, strict=True):
        for matrix, parameter in zip("AB", pair[:2], strict=True):
            gaps.append(parameter.grad - getattr(layer, f"lora_{matrix}")["default"].weight.grad)
    groups.destroy_model_parallel_groups()
    return max(float(gap.detach().abs().max()) for gap in gaps)


if __name__ == "__main__":
    main()
