"""One rank that records and replays routes in each case and says what it saw.

python -m tests.engine.replay.rank NAME...   (of a case; `reference:NAME`: of a case's reference)
"""

import sys
from dataclasses import replace
from typing import Any

import torch

from tests import world
from tests.engine.replay.cases import CASES, LENGTHS, MICRO_BATCHES, MORE, VOCABULARY, Case
from tests.ranks import finish_rank, plan_patches, start_rank


def main(names: list[str]) -> None:
    by_name: dict[str, Any] = {case.name: case for case in CASES + MORE}
    by_name |= {f"reference:{case.reference.name}": case.reference for case in CASES + MORE}
    cases = [by_name[name] for name in names]
    runtime, _ = start_rank(plan_patches(cases))
    finish_rank(world.each(((case.name, case) for case in cases), lambda case: seen(case, runtime)))


def seen(case: Case, runtime: Any) -> dict[str, Any]:
    """Loss and gradient norm with the router's own and with foreign routes, and the first recorded routes.

    What must hold on one rank by itself is asserted here.
    """
    from bundle.engine import Engine
    from bundle.mcore import context, groups

    class Stages:
        """The runtime, with a first pipeline stage of its own size."""

        def __getattr__(self, name: str) -> Any:
            return getattr(runtime, name)

        def build_config_options(self, recipe: Any) -> dict[str, Any]:
            first = {"num_layers_in_first_pipeline_stage": case.first_stage} if case.first_stage else {}
            return {**runtime.build_config_options(recipe), **first}

    recipe = case.recipe()
    with runtime.megatron_calls():
        state = groups.create_model_parallel_groups(recipe.parallel, seed=1, timeout_seconds=60)
    device = world.device(runtime)
    engine = Engine(recipe, Stages(), state, device)
    each = MICRO_BATCHES // state.dp.size
    mine = range(state.dp.rank * each, (state.dp.rank + 1) * each)
    batches = [micro_batch(case, state, number, device) for number in mine]

    with engine.replay.record_routes() as own:
        engine.compute_log_probs(batches)
    with engine.replay.record_routes() as trained:
        first = step(engine, batches)
    for a, b in zip(own, trained, strict=True):  # without gradients newer releases do not sort a row
        assert torch.equal(a.experts.sort(-1).values, b.experts.sort(-1).values)
    with engine.replay.record_routes() as again:
        second = step(engine, with_routes(batches, own))
    assert second == first, (second, first)
    assert len(own) == len(batches) and all(map(same, own, again))
    if not case.parallel:
        elsewhere = replace(own[0], layers=tuple(layer + 1 for layer in own[0].layers))
        short = replace(own[-1], experts=own[-1].experts[1:])
        said = refused(engine, with_routes(batches, [elsewhere, *own[1:-1], short]))
        assert [text[:13] for text in said] == ["micro-batch 0", "micro-batch 3"], said
        interrupt(engine, with_routes(batches, again[::-1]))
        assert context.router_choices.get() is None
        with engine.replay.record_routes() as afterwards:
            assert step(engine, batches) == first
        assert all(map(same, trained, afterwards))

    disturb(engine.models)
    with engine.replay.record_routes() as other:
        engine.compute_log_probs(batches)
    moved = sum(float((a.experts != b.experts).float().mean()) for a, b in zip(own, other, strict=True))
    assert moved / len(own) > 0.1, "replaying proves nothing if the routers would choose the same"
    with engine.replay.record_routes() as replayed:
        step(engine, with_routes(batches, own))
    assert all(map(same, own, replayed))

    foreign = [routes(engine.replay.routing, number) for number in mine]
    with engine.replay.record_routes() as taken:
        last = step(engine, with_routes(batches, foreign))
    for asked, got in zip(foreign, taken, strict=True):
        chosen = got.experts.cpu()
        assert torch.equal(chosen[~asked.free_mask], asked.experts[~asked.free_mask])
        assert (chosen[asked.free_mask] != asked.experts[asked.free_mask]).any()
    assert context.router_choices.get() is None
    groups.destroy_model_parallel_groups()
    return {"own": first, "foreign": last, "routes": own[0].experts.tolist()}


def micro_batch(case: Case, state: Any, number: int, device: Any = "cpu") -> Any:
    """Micro-batch `number` of the step, the same tokens in every layout."""
    from bundle.engine.microbatch import from_packing, from_rows
    from bundle.packing.packing import Packing

    generator = torch.Generator().manual_seed(number)
    depths, cp = int(case.mtp), state.cp
    ids = torch.randint(0, VOCABULARY, (sum(LENGTHS),), generator=generator).to(device)
    labels = torch.randint(0, VOCABULARY, (sum(LENGTHS),), generator=generator).to(device)
    mask = torch.ones(sum(LENGTHS), device=device)
    if case.layout == "rows":
        whole = (x.view(2, -1) for x in (ids, labels, mask))
        return from_rows(*whole, cp=cp.size, rank=cp.rank, mtp_layers=depths)
    packing = Packing.from_lengths(LENGTHS, case.alignment, rank=cp.rank, device=device)
    return from_packing(ids, labels, mask, packing, mtp_layers=depths)


def routes(routing: Any, number: int) -> Any:
    """Distinct experts for every token and layer of micro-batch `number`; a third of the tokens are free."""
    generator = torch.Generator().manual_seed(100 + number)
    layers = routing.layers[::-1]
    choice = torch.rand(sum(LENGTHS), len(layers), routing.experts, generator=generator)
    experts = choice.topk(routing.topk).indices
    return routing.build_checked_routes(experts, layers, free_mask=torch.arange(sum(LENGTHS)) % 3 == 2)


def with_routes(batches: list[Any], given: list[Any]) -> list[Any]:
    return [replace(one, routes=routes) for one, routes in zip(batches, given, strict=True)]


def step(engine: Any, batches: list[Any]) -> list[float]:
    """[main loss, MTP losses.., gradient norm] of a step that changes no weight."""
    engine.forward_backward(batches)
    with engine.runtime.megatron_calls():
        engine.optimizer.prepare_grads()
        norm = float(engine.optimizer.get_grad_norm())
    losses = engine.take_losses()
    return [losses.main, *losses.mtp, norm]


def refused(engine: Any, batches: list[Any]) -> tuple[str, ...]:
    """What is wrong with the routes of these micro-batches."""
    from bundle.errors import JobFailed

    try:
        engine.forward_backward(batches)
    except JobFailed as error:
        return error.violations
    raise AssertionError("these routes do not fit")


def interrupt(engine: Any, batches: list[Any]) -> None:
    """A step that ends with an exception after its second micro-batch has gone through half of the model."""
    runs = iter(range(10))

    def fail(*_: Any) -> None:
        if next(runs) == 1:
            raise ZeroDivisionError

    hook = engine.models[0].decoder.layers[2].register_forward_pre_hook(fail)
    try:
        with engine.replay.record_routes():
            engine.forward_backward(batches)
        raise AssertionError("the step should not have ended")
    except ZeroDivisionError:
        hook.remove()
    engine.take_losses()  # those of the first micro-batch


def disturb(models: list[torch.nn.Module]) -> None:
    """Has the routers choose other experts: the same change in every layout."""
    from bundle.mcore import routers

    with torch.no_grad():
        for model in models:
            for router in routers.find_routers(model):
                router.weight.copy_(router.weight.roll(1, dims=1))


def same(a: Any, b: Any) -> bool:
    return bool(a.layers == b.layers and torch.equal(a.experts, b.experts))


if __name__ == "__main__":
    main(sys.argv[1:])
