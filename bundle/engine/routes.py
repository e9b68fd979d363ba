"""Routes: the experts that routers chose for the tokens of a micro-batch, as data and as routers see them.

As data they are in the order of the tokens. A router is given [s, b, h] of its rank: position by position,
and under sequence parallelism only this tensor rank's stretch of positions. Padding is laid out by the
micro-batch's own Packing, so that the rows of routes are those of the tokens, FP8 or not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bundle.architectures import Architecture
from bundle.errors import JobFailed
from bundle.mcore.context import ForcedRoutes
from bundle.packing.packing import Packing
from bundle.transfers import copy_to_device

_EXPERT_NUMBER_DTYPES = (torch.uint8, torch.int16, torch.int32)


def choose_dtype(experts: int) -> torch.dtype:
    """Return the narrowest integer type that can name each of `experts` experts."""
    return next(dtype for dtype in _EXPERT_NUMBER_DTYPES if experts - 1 <= torch.iinfo(dtype).max)


@dataclass(frozen=True)
class Routes:
    """Experts [tokens, L, k], the sequences one after the other and unpadded, as `Packing` takes them.

    `layers` are the L, counted from 0 over the whole model. `free` [tokens] is True where the router shall
    choose by itself, as for a rollout's last token, which never went through the model; None: nowhere.
    Made by `Routing.build_checked_routes`, which checks what comes from outside, or by recording.
    """

    layers: tuple[int, ...]
    experts: Tensor
    free_mask: Tensor | None = None

    def split_sequences(self, packing: Packing) -> tuple["Routes", ...]:
        """Return the routes of each sequence of a micro-batch, as views."""
        experts = packing.split_concatenated(self.experts)
        free = [None] * len(experts) if self.free_mask is None else packing.split_concatenated(self.free_mask)
        return tuple(Routes(self.layers, e, f) for e, f in zip(experts, free, strict=True))


def join_routes(parts: Sequence[Routes]) -> Routes:
    """Return the routes of sequences that follow each other in one micro-batch; all have the same layers.

    Raises JobFailed for routes of different layers.
    """
    layers = {part.layers for part in parts}
    if len(layers) != 1:
        raise JobFailed(f"Routes of different layers cannot be joined: {sorted(layers)}.")
    free = None
    if any(part.free_mask is not None for part in parts):
        free = torch.cat([_get_free_mask(part) for part in parts])
    return Routes(parts[0].layers, torch.cat([part.experts for part in parts]), free)


def _get_free_mask(routes: Routes) -> Tensor:
    if routes.free_mask is not None:
        return routes.free_mask
    return torch.zeros(len(routes.experts), dtype=torch.bool, device=routes.experts.device)


@dataclass(frozen=True)
class Routing:
    """Which layers of a model choose experts, from how many, and how many each token gets.

    The routers of multi-token prediction are not among the layers: what they choose moves no log-probability
    of the model, and a rollout without them has no routes of theirs.
    """

    layers: tuple[int, ...]
    experts: int
    topk: int

    @classmethod
    def from_architecture(cls, architecture: Architecture) -> "Routing":
        """Return the routing of a model with experts."""
        moe = architecture.moe
        assert moe is not None, "a recipe with router replay has experts"
        layers = tuple(layer for layer, has_experts in enumerate(moe.layer_pattern) if has_experts)
        return cls(layers, moe.num_experts, moe.topk)

    @property
    def dtype(self) -> torch.dtype:
        """The type of routes of this model."""
        return choose_dtype(self.experts)

    def build_checked_routes(
        self, experts: Tensor, layers: Sequence[int], *, free_mask: Tensor | None = None
    ) -> Routes:
        """Return checked routes from outside (a rollout): [tokens, L, k] of exactly this model's layers.

        `layers` names the layer of each of the L, counted from 0, in any order. Values in free rows are
        ignored. Raises JobFailed with everything that is wrong. It reads the values, so pass tensors on the
        host.
        """
        violations = [*self._check_layers(layers), *self._check_form(experts, len(layers), free_mask)]
        if not violations:
            if free_mask is not None:
                experts = experts.masked_fill(free_mask[:, None, None], 0)
            violations = self._check_values(experts, layers, free_mask)
        if violations:
            raise JobFailed(
                "the recorded expert routes do not fit this model. Record them again with this model:",
                violations,
            )
        columns = [list(layers).index(layer) for layer in self.layers]
        return Routes(self.layers, experts[:, columns].to(self.dtype), free_mask)

    def find_misfits(self, routes: Routes, tokens: int) -> list[str]:
        """Return why routes do not fit this model or a micro-batch of `tokens`, without reading values."""
        shape = [tokens, len(self.layers), self.topk]
        problems = []
        if routes.layers != self.layers:
            problems.append(
                f"the routes are for layers {list(routes.layers)}, but the model has routers in"
                f" {list(self.layers)}"
            )
        if list(routes.experts.shape) != shape or routes.experts.dtype != self.dtype:
            actual = f"{routes.experts.dtype} {list(routes.experts.shape)}"
            problems.append(f"the routes are {actual}, but the micro-batch needs {self.dtype} {shape}")
        if routes.free_mask is not None and list(routes.free_mask.shape) != [tokens]:
            problems.append(f"free_mask has shape {list(routes.free_mask.shape)}, but needs [{tokens}]")
        return problems

    def _check_layers(self, layers: Sequence[int]) -> list[str]:
        kinds = {
            "have no routes": set(self.layers) - set(layers),
            f"have no router to replay (the layers with routers are {list(self.layers)})": set(layers)
            - set(self.layers),
            "are listed more than once": {layer for layer in layers if list(layers).count(layer) > 1},
        }
        return [f"layers {sorted(layer_set)} {defect}" for defect, layer_set in kinds.items() if layer_set]

    def _check_form(self, experts: Tensor, layers: int, free: Tensor | None) -> list[str]:
        problems = []
        if experts.dtype.is_floating_point or experts.dtype.is_complex or experts.dtype == torch.bool:
            problems.append(f"they are {experts.dtype}, but expert numbers must be integers")
        elif torch.iinfo(experts.dtype).max < self.experts - 1:
            problems.append(f"{experts.dtype} is too small for {self.experts} experts and cuts off numbers")
        if experts.ndim != 3 or experts.shape[1:] != (layers, self.topk):
            problems.append(
                f"their shape is {list(experts.shape)}, not [tokens, {layers} layers, {self.topk} experts]"
            )
        if free is not None and (free.dtype != torch.bool or free.shape != experts.shape[:1]):
            problems.append(
                f"free_mask is {free.dtype} {list(free.shape)}, not torch.bool {list(experts.shape[:1])}"
            )
        return problems

    def _check_values(self, experts: Tensor, layers: Sequence[int], free: Tensor | None) -> list[str]:
        def describe_first(rows: Tensor) -> str:
            token, column = rows.nonzero()[0].tolist()
            return (
                f"{int(rows.sum())} time(s), first for token {token} in layer {layers[column]}:"
                f" {experts[token, column].tolist()}"
            )

        problems = []
        outside = experts < 0
        if self.experts <= torch.iinfo(experts.dtype).max:
            outside |= experts >= self.experts
        if (rows := outside.any(-1)).any():
            problems.append(f"an expert is outside 0 to {self.experts - 1} ({describe_first(rows)})")
        ordered = experts.sort(-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
        if free is not None:
            twice &= ~free[:, None]
        if twice.any():
            problems.append(f"a token has the same expert twice ({describe_first(twice)})")
        return problems


def build_forced_routes_with_padding(
    routes: Routes | None, packing: Packing, routing: Routing, layers: Sequence[int], *, part: int, parts: int
) -> ForcedRoutes | None:
    """Return the experts that the routers of these layers must choose on this rank; None: none.

    Without routes only padding rows are forced, so that recording computes what replay will compute. `part`
    of `parts` is the tensor rank under sequence parallelism.
    """
    padded = packing.padding.total_rows_over_cp_ranks > packing.padding.real_tokens
    if not layers or (routes is None and not padded):
        return None

    spread = _assign_padding_experts(packing.valid, routing)
    if routes is None:
        rows = to_router_rows(~packing.valid, part, parts)
        experts = to_router_rows(spread, part, parts)[:, None].expand(-1, len(layers), -1)
    else:
        columns = [routes.layers.index(layer) for layer in layers]
        chosen = copy_to_device(routes.experts[:, columns], packing.device)
        experts = to_router_rows(
            packing.pack_concatenated_tokens(chosen, fill=spread[:, :, None]), part, parts
        )
        rows = None
        if routes.free_mask is not None:
            is_forced = ~copy_to_device(routes.free_mask, packing.device)
            rows = to_router_rows(packing.pack_concatenated_tokens(is_forced, fill=True), part, parts)
    by_layer = experts.transpose(0, 1).contiguous()
    return ForcedRoutes(dict(zip(layers, by_layer, strict=True)), rows)


def to_router_rows(x: Tensor, part: int, parts: int) -> Tensor:
    """Return [b, s/cp, ...] as this rank's router sees it, [t, ...]; `part` of `parts`: the tensor rank."""
    return x.transpose(0, 1).flatten(0, 1).chunk(parts)[part]


def from_router_rows(x: Tensor, packing: Packing) -> Tensor:
    """Return the concatenated [tokens, ...] of all ranks' router rows [cp, tp, t, ...]; tp 1 without SP."""
    rows, columns = packing.local_shape
    cp = packing.alignment.cp
    by_position = x.reshape(cp, columns, rows, *x.shape[3:])
    return packing.unpack_gathered_shards(by_position.transpose(1, 2).flatten(0, 1))


def _assign_padding_experts(valid: Tensor, routing: Routing) -> Tensor:
    """Return experts [b, s/cp, k] for padding rows; the counts of two experts differ by one row at most."""
    place = (~valid).flatten().cumsum(0).view(valid.shape) - 1
    choice = torch.arange(routing.topk, device=valid.device)
    return ((place[..., None] * routing.topk + choice) % routing.experts).to(routing.dtype)
