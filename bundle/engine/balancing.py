"""The loss that keeps experts equally busy, and the z-loss of their routers, alike in every release.

Megatron's own depend on the layout, on padding and on how many tokens are learned, each release in its own
way (docs/decisions/015-experts-balanced-by-the-engine.md); it is told to compute none. What is added to the
mean loss of a step here is, for each layer with experts:

    balancing: aux_loss_coeff * sum_g T_g / T * E / (k * T_g^2) * sum_i n_gi * p_gi
    z-loss:    z_loss_coeff / T * sum_t logsumexp(logits_t)^2

over the T tokens of the step, padding left out, prompts not. A group g is a sequence where the model balances
each sequence (in packs and rows alike), else a micro-batch: that loss then depends on the cut into
micro-batches, by its definition. n_gi are the tokens of the group that have expert i among their k best
scores, without the steering bias; p_gi are the sums of the scores. Layers of multi-token prediction balance
the same tokens.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from bundle.architectures import MoE
from bundle.engine.microbatch import MicroBatch
from bundle.engine.routes import to_router_rows
from bundle.mcore import routers
from bundle.mcore.context import is_in_backward
from bundle.mcore.groups import Groups, get_tp_cp_group
from bundle.mcore.routers import RouterRows
from bundle.recipe import Recipe
from bundle.transfers import copy_to_device


class RouterBalancer:
    """What is behind the routers of one engine's model chunks; idle where the model has no experts."""

    def __init__(self, recipe: Recipe, models: Sequence[torch.nn.Module], groups: Groups) -> None:
        """`models` are the bare chunks of this rank."""
        self._moe, self._z_loss_coeff = recipe.architecture.moe, recipe.model.moe.z_loss_coeff
        self._groups, self._tp = groups, groups.tp if recipe.parallel.sequence_parallel else None
        self._routers = [router for model in models for router in routers.find_routers(model)]
        self._rows: dict[int, RouterRows] = {}  # by id of the micro-batch
        self._current: RouterRows | None = None  # of the forward pass that runs
        self._recompute_queues: dict[object, deque[RouterRows]] = defaultdict(deque)  # to be recomputed
        self._weight: Tensor | None = None  # None: no term has a coefficient
        self._biases: list[Tensor] = []
        for router in self._routers:
            routers.attach_balancing_loss(router, self)

    def count_local_balanced_tokens(self, micro_batches: Sequence[MicroBatch]) -> int | None:
        """Return the number of balanced tokens of this rank; None where no term has a coefficient."""
        if self._moe is None or not (self._moe.aux_loss_coeff or self._z_loss_coeff):
            return None
        if self._groups.cp.rank:
            return 0
        return sum(
            micro_batch.packing.padding.real_tokens
            for micro_batch in micro_batches
            if not micro_batch.is_blank
        )

    @contextmanager
    def balance_step(self, micro_batches: Sequence[MicroBatch], weight: Tensor | None) -> Iterator[None]:
        """Balance the run inside the context, which trains on these micro-batches.

        `weight` is the number of learned tokens divided by that of `count_local_balanced_tokens`.
        """
        if self._moe is None:
            yield
            return
        self._rows = {id(micro_batch): self._build_rows(micro_batch) for micro_batch in micro_batches}
        self._weight = weight
        self._biases = [router.expert_bias.clone() for router in self._routers if self._moe.expert_bias]
        try:
            yield
        finally:
            self._rows, self._recompute_queues = {}, defaultdict(deque)

    @contextmanager
    def balance_forward(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Balance one forward pass of a model chunk inside the context."""
        self._current = self._rows.get(id(micro_batch))
        try:
            yield
        finally:
            self._current = None

    def restore_biases(self) -> None:
        """Restore the steering biases to the values that they had before the latest run moved them."""
        for router, bias in zip(self._routers, self._biases, strict=bool(self._biases)):
            router.expert_bias.copy_(bias)

    def take_current_rows(self, router: object) -> RouterRows | None:
        """Return the rows of the forward pass that this router runs; see `bundle.mcore.routers.Balancer`."""
        if not self._rows:
            return None
        if is_in_backward():  # the pipeline recomputes micro-batches in the order of their forward passes
            return self._recompute_queues[router].popleft()
        if self._current and not torch.is_grad_enabled():  # the first pass of a checkpoint
            self._recompute_queues[router].append(self._current)
        return self._current

    def compute_term(self, rows: RouterRows, logits: Tensor) -> Tensor | None:
        """Return the term of the loss for these logits; megatron divides it by the learned tokens.

        See `bundle.mcore.routers.Balancer`.
        """
        if self._weight is None:
            return None
        assert self._moe is not None, "there are routers"
        logits, terms = logits.float(), []
        if self._moe.aux_loss_coeff:
            terms.append(self._moe.aux_loss_coeff * _compute_balancing_loss(self._moe, rows, logits))
        if self._z_loss_coeff:
            squares = logits.logsumexp(-1).square()
            terms.append(self._z_loss_coeff * (squares * (rows.group_index < len(rows.group_tokens))).sum())
        return torch.stack(terms).sum() * self._weight

    def _build_rows(self, micro_batch: MicroBatch) -> RouterRows:
        """Return the rows of a micro-batch; its sequences are groups, or it is one group.

        A blank is all padding.
        """
        assert self._moe is not None
        packing, is_blank = micro_batch.packing, micro_batch.is_blank
        padding, valid = packing.padding, packing.valid & (not is_blank)
        if self._moe.aux_loss_per_sequence:
            lengths = list(padding.lengths)
            owner = packing.repeat_per_packed_row(torch.arange(len(lengths), device=packing.device)).where(
                valid, len(lengths)
            )
        else:
            lengths, owner = [padding.real_tokens], (~valid).long()
        part, parts = (self._tp.rank, self._tp.size) if self._tp else (0, 1)
        padded = padding.total_rows_over_cp_ranks > padding.real_tokens or is_blank
        return RouterRows(
            to_router_rows(owner, part, parts),
            copy_to_device(torch.tensor(lengths, dtype=torch.float32), packing.device),
            to_router_rows(~valid, part, parts) if padded else None,
        )


def _compute_balancing_loss(moe: MoE, rows: RouterRows, logits: Tensor) -> Tensor:
    """Return this rank's part of the balancing loss of all groups, weighted by tokens; at best 1 for each."""
    if moe.score_function == "sigmoid":
        scores = logits.sigmoid()
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    else:
        scores = logits.softmax(-1)
    groups, shape = len(rows.group_tokens), (len(rows.group_tokens) + 1, moe.num_experts)
    with torch.no_grad():
        best = scores.topk(moe.topk, dim=-1).indices
        places = (rows.group_index[:, None] * moe.num_experts + best).flatten()
        counts = (
            scores.new_zeros(shape).view(-1).scatter_add(0, places, scores.new_ones(()).expand(places.shape))
        )
        counts = counts.view(shape)[:groups]
        if dist.get_world_size(get_tp_cp_group()) > 1:
            dist.all_reduce(counts, group=get_tp_cp_group())
    sums = scores.new_zeros(shape).index_add(0, rows.group_index, scores)[:groups]
    shares: Tensor = sums * counts / rows.group_tokens.clamp(min=1)[:, None]
    return shares.sum() * (moe.num_experts / moe.topk)
