"""One of two tensor-parallel ranks that replays routes over a pack that FP8 has padded.

python -m tests.seeds.router_replay_fp8; see tests.world.
"""

from dataclasses import replace
from typing import Any

import torch

from tests.engine.replay.cases import LENGTHS, MICRO_BATCHES, Case
from tests.engine.replay.rank import micro_batch, same, step, with_routes
from tests.ranks import finish_rank, plan_patches, start_rank

CASE: Any = Case("tp2 ep2 fp8", {"tp": 2, "ep": 2, "etp": 1}, scaling="blockwise")


class Seen(Exception):
    """Ends a forward pass at the first router, with the experts [t, k] of every row, -1 where it has none."""

    def __init__(self, chosen: torch.Tensor) -> None:
        self.experts = chosen.long().topk(2).indices.masked_fill(~chosen.any(-1, keepdim=True), -1)


def main() -> None:
    runtime, rank = start_rank(plan_patches([CASE]))
    from bundle.engine import Engine
    from bundle.engine.routes import build_forced_routes_with_padding
    from bundle.errors import JobFailed
    from bundle.mcore import context, groups, routers
    from bundle.packing.packing import Packing

    with runtime.megatron_calls():
        state = groups.create_model_parallel_groups(CASE.recipe().parallel, seed=1, timeout_seconds=60)
    engine = Engine(CASE.recipe(), runtime, state, torch.device("cpu"))
    batches = [micro_batch(CASE, state, number) for number in range(MICRO_BATCHES)]
    routing = engine.replay.routing

    # With the padding: what is replayed is what was recorded.
    with engine.replay.record_routes() as recorded:
        first = step(engine, batches)
    with engine.replay.record_routes() as replayed:
        second = step(engine, with_routes(batches, recorded))
    said: dict[str, Any] = {"equal": second == first and all(map(same, recorded, replayed))}

    # Tokens that are not padded: FP8 does not multiply them.
    try:
        forward(engine, micro_batch(replace(CASE, scaling=None), state, 0))
    except JobFailed as error:
        said["tokens"] = str(error)

    # Routes that are not padded: the tokens lie as FP8 wants them, their routes as they would lie without it.
    part = {"part": rank, "parts": 2}
    plain = Packing.from_lengths(LENGTHS, CASE.alignment._replace(scaling=None))
    unpadded = build_forced_routes_with_padding(recorded[0], plain, routing, routing.layers, **part)
    padded = build_forced_routes_with_padding(
        recorded[0], batches[0].packing, routing, routing.layers, **part
    )
    assert unpadded is not None and padded is not None
    model, layer = engine.models[0], routing.layers[0]
    said["rows"] = [len(one.experts[layer]) for one in (unpadded, padded)]
    choices = context.RouterChoices(
        routers.map_decoder_routers_to_layers(model), routing.dtype, has_backward=False
    )
    with context.router_choices.set(choices), choices.record_forward(unpadded):
        try:
            forward(engine, batches[0])
        except JobFailed as error:
            said["refused"] = str(error)
    router = routers.find_routers(model)[0]
    if getattr(router, "router_replay", None):
        # Megatron's own replay takes the rows as they come.
        routers.set_megatron_replay(router, unpadded.experts[layer].long())
        router.register_forward_hook(see)
        try:
            forward(engine, batches[0])
        except Seen as seen:
            asked = padded.experts[layer].long()
            wrong = (seen.experts.sort(-1).values != asked.sort(-1).values).any(-1)
            real = batches[0].packing.valid[0].chunk(2)[rank]
            said["misrouted"] = float(wrong[real].float().mean())
    finish_rank(said)


def see(_router: Any, _args: Any, output: Any) -> None:
    raise Seen(output[1])


def forward(engine: Any, batch: Any) -> None:
    with engine.runtime.megatron_calls(), torch.no_grad():
        engine.models[0](
            batch.ids,
            batch.position_ids,
            None,
            labels=batch.labels,
            packed_seq_params=batch.packed_seq_params,
        )


if __name__ == "__main__":
    main()
