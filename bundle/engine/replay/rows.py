"""Routes in the order in which routers see tokens, and back.

A router is given [s, b, h] of its rank: position by position, and under sequence parallelism only this tensor
rank's stretch of positions. Padding is laid out by the micro-batch's own Packing, so that the rows of routes
are those of the tokens, FP8 or not.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bundle.engine.replay.routes import Routes, Routing
from bundle.mcore.context import Forced
from bundle.sequences.packing import Packing


def forced(
    routes: Routes | None, packing: Packing, routing: Routing, layers: Sequence[int], *, part: int, parts: int
) -> Forced | None:
    """What the routers of these layers must choose on this rank; None: nothing.

    Without routes only padding rows are, so that recording computes what replaying will. `part` of `parts`:
    the tensor rank under sequence parallelism.
    """
    padded = packing.padding.total > packing.padding.tokens
    if not layers or (routes is None and not padded):
        return None

    spread = _spread(packing.valid, routing)
    if routes is None:
        rows = seen(~packing.valid, part, parts)
        experts = seen(spread, part, parts)[:, None].expand(-1, len(layers), -1)
    else:
        columns = [routes.layers.index(layer) for layer in layers]
        chosen = routes.experts[:, columns].to(packing.device, non_blocking=True)
        experts = seen(packing.pack(chosen, fill=spread[:, :, None]), part, parts)
        rows = None
        if routes.free is not None:
            given = ~routes.free.to(packing.device, non_blocking=True)
            rows = seen(packing.pack(given, fill=True), part, parts)
    by_layer = experts.transpose(0, 1).contiguous()
    return Forced(dict(zip(layers, by_layer, strict=True)), rows)


def seen(x: Tensor, part: int, parts: int) -> Tensor:
    """[b, s/cp, ...] of this rank -> [t, ...] as its router sees it; `part` of `parts`: the tensor rank."""
    return x.transpose(0, 1).flatten(0, 1).chunk(parts)[part]


def unseen(x: Tensor, packing: Packing) -> Tensor:
    """The concatenated [tokens, ...] of what all ranks' routers saw: [cp, tp, t, ...], tp 1 without SP."""
    rows, columns = packing.shape
    cp = packing.alignment.cp
    by_position = x.reshape(cp, columns, rows, *x.shape[3:])
    return packing.unpack(by_position.transpose(1, 2).flatten(0, 1))


def _spread(valid: Tensor, routing: Routing) -> Tensor:
    """Experts [b, s/cp, k] for padding rows, no expert getting two rows more than another."""
    place = (~valid).flatten().cumsum(0).view(valid.shape) - 1
    choice = torch.arange(routing.topk, device=valid.device)
    return ((place[..., None] * routing.topk + choice) % routing.experts).to(routing.dtype)
