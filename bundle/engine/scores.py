"""Log-probabilities and entropies of labels, from logits, or from hidden states in chunks of tokens.

In chunks, the logits of a chunk are computed, measured and forgotten, and computed again in the backward
pass. Then no tensor is as large as the logits of all tokens. The logits of the first tokens can be kept
instead, and their gradient is written over them.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from bundle.backends import AddGradient

# Rows are taken in portions: beside the logits and their gradient, no tensor is as large as them. This many
# numbers (128 MiB in float32) are enough to keep a device busy.
_PORTION_VALUES = 1 << 25

# The logit of a padding row of the vocabulary: no share in any softmax. Finite, in bf16 and at any
# temperature: 0 times infinity, in an entropy or on a rank whose rows are all padding, would be no number.
_PADDING_LOGIT = -1e20


@dataclass(frozen=True)
class Scores:
    """What a model says of each label: its log-probability, and the entropy [nats] of the distribution."""

    log_probs: Tensor
    entropy: Tensor


class Head(NamedTuple):
    """The product that gives logits: this rank's weight [vocabulary / tp, h], for `chunk` tokens at a time.

    The first `limit` logits of a token are of the vocabulary, the rest is padding. `add_gradient` adds
    gradientsᵀ inputs to a sum in float32 in one product, as (inputs [n, h], gradients [n, v], sum [v, h]).
    The first `kept_tokens` tokens are one chunk, whose logits are kept for the backward pass.
    """

    weight: Tensor
    chunk: int
    limit: int
    add_gradient: "AddGradient | None" = None
    kept_tokens: int = 0


def mask_padding(logits: Tensor, limit: int) -> None:
    """Take all but the first `limit` logits of each token out of every softmax, in place.

    Autograd does not see it, as it would copy the gradient: that of a logit without a share is 0 already.
    """
    if limit < logits.shape[-1]:
        logits.detach()[..., limit:].fill_(_PADDING_LOGIT)


def score_labels(
    states: Tensor,
    labels: Tensor,
    group: dist.ProcessGroup | None,
    temperature: Tensor | None = None,
    head: Head | None = None,
) -> Scores:
    """Return the scores [b, s] of `labels` [b, s] under logits, float32 at least.

    `states` are the logits [s, b, vocabulary / tp], or with a `head` its input [s, b, h], the same on all
    ranks that share the vocabulary. `group` holds these ranks; None for one. `temperature` [b, s] divides
    the logits of each token. Both results are differentiable with respect to the states and the weight,
    exactly; the gradient of the states is this rank's part of a sum over the group. The log-probability of
    a label that has no logit is not a number.
    """
    weight, chunk, limit, add_gradient, kept_tokens = head or (None, max(1, labels.numel()), 0, None, 0)
    width = states.shape[-1] if weight is None else weight.shape[0]
    columns = width * (group.size() if group is not None else 1)
    is_known = (labels >= 0) & (labels < columns)
    rows = labels.shape[::-1]
    log_probs, entropy = _LogProbsAndEntropies.apply(  # type: ignore[no-untyped-call]
        states.flatten(0, 1),
        weight,
        labels.t().flatten(),
        None if temperature is None else temperature.t().flatten(),
        group if group is not None and group.size() > 1 else None,
        min(kept_tokens, labels.numel()) if torch.is_grad_enabled() else 0,
        chunk,
        limit,
        add_gradient,
    )
    return Scores(log_probs.view(rows).t() * torch.where(is_known, 1.0, float("nan")), entropy.view(rows).t())


class _LogProbsAndEntropies(torch.autograd.Function):
    """(log-probabilities, entropies) [n] from logits [n, v], or from states [n, h] and a weight [v, h].

    It keeps those as they came, the logits of `kept_tokens` tokens, and [n] numbers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor | None,
        labels: Tensor,
        temperature: Tensor | None,
        group: Any,
        kept_tokens: int,
        chunk: int,
        limit: int,
        add_gradient: "AddGradient | None",
    ) -> Any:
        width = states.shape[1] if weight is None else weight.shape[0]
        column = labels - (width * group.rank() if group is not None else 0)
        is_local = (column >= 0) & (column < width)
        column = column.where(is_local, 0)

        sizes, memory = _list_chunk_sizes(len(states), kept_tokens, chunk), _LogitsMemory(weight, limit)
        parts, kept_logits = [], None
        for inputs, *row_values in _split(sizes, states, column, temperature):
            logits = memory.compute_logits(inputs)
            parts += _map_rows(_compute_softmax_partials, weight, logits, *row_values)
            if kept_tokens and kept_logits is None:
                kept_logits = memory.release()
        peak, total, weighted, picked = (torch.cat(part) for part in zip(*parts, strict=True))
        if group is not None:
            peak, total, weighted, picked = _reduce_over_ranks(
                group, peak, total, weighted, picked.where(is_local, 0), is_local
            )

        norm = total.log()
        entropy = norm - weighted / total
        label = column.where(is_local, -1)
        ctx.save_for_backward(states, weight, kept_logits, label, temperature, peak + norm, entropy)
        ctx.set_materialize_grads(False)
        ctx.sizes, ctx.limit, ctx.add_gradient = sizes, limit, add_gradient
        return picked - norm, entropy

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        states, weight, kept_logits, *rows = ctx.saved_tensors
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(rows[-1])
        gradient = torch.empty_like(states)
        weight_gradient = _WeightGradient(weight, ctx.add_gradient) if ctx.needs_input_grad[1] else None
        memory = _LogitsMemory(weight, ctx.limit, kept_logits)
        chunks = _split(ctx.sizes, states, gradient, *rows, grad_log_probs, grad_entropy)
        for number, (inputs, result, *row_values) in enumerate(chunks):
            is_kept = kept_logits is not None and number == 0
            logits = kept_logits if is_kept else memory.compute_logits(inputs)
            slopes = result if weight is None else None
            _map_rows(_write_slopes, weight, logits, slopes, *row_values)
            if weight is not None:
                torch.mm(logits, weight, out=result)
            if weight_gradient is not None:
                weight_gradient.add(inputs, logits)
        return (
            gradient,
            weight_gradient and weight_gradient.compute_autograd_remainder(),
            *[None] * 7,
        )


class _WeightGradient:
    """The gradient of a weight [v, h], added up in float32.

    Where megatron accumulates in float32, that is `main_grad`, and autograd adds zeros to it later.
    """

    def __init__(self, weight: Tensor, add_gradient: "AddGradient | None") -> None:
        main: Tensor | None = getattr(weight, "main_grad", None)
        self._is_main = main is not None and main.dtype is torch.float32
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self._weight, self._add_gradient = weight, add_gradient
        self._sum = main if main is not None and self._is_main else torch.zeros_like(weight, dtype=dtype)

    def add(self, inputs: Tensor, gradients: Tensor) -> None:
        """Add the part of the tokens with these inputs [n, h] and gradients of their logits [n, v]."""
        if self._add_gradient is None:
            self._sum += gradients.t() @ inputs
        else:
            self._add_gradient(inputs, gradients, self._sum)

    def compute_autograd_remainder(self) -> Tensor:
        """Return what autograd adds to the gradient of the weight."""
        return torch.zeros_like(self._weight) if self._is_main else self._sum.to(self._weight.dtype)


class _LogitsMemory:
    """The memory of a chunk's logits, which the next chunk takes over."""

    def __init__(self, weight: Tensor | None, limit: int, memory: Tensor | None = None) -> None:
        self._weight, self._limit, self._memory = weight, limit, memory

    def compute_logits(self, states: Tensor) -> Tensor:
        """Return the logits [n, v] of states [n, h]; without a weight, the states themselves."""
        if self._weight is None:
            return states
        if self._memory is None or len(self._memory) < len(states):
            self._memory = states.new_empty(len(states), len(self._weight))
        logits = torch.mm(states, self._weight.t(), out=self._memory[: len(states)])
        mask_padding(logits, self._limit)
        return logits

    def release(self) -> Tensor | None:
        """Return the memory, which the next chunk does not take over."""
        memory, self._memory = self._memory, None
        return memory


def _compute_softmax_partials(
    logits: Tensor, column: Tensor, temperature: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the peak, the sums of exp(x - peak) and of its products with x - peak, the label's x - peak."""
    x = _compute_scaled_logits(logits, temperature)
    peak = x.amax(1)
    x = x - peak[:, None]
    picked = x.gather(1, column[:, None]).squeeze(1)
    weights = x.exp()
    return peak, weights.sum(1), (weights * x).sum(1), picked


def _write_slopes(
    logits: Tensor,
    result: Tensor | None,
    label: Tensor,
    temperature: Tensor | None,
    norm: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
) -> None:
    """Write the gradient of the logits to `result`, or over the logits if it is None.

    `label` is -1 for a label that this rank has no logit of. Never give the logits as `result`:
    torch.compile computes wrong gradients of two views of one memory.
    """
    log_p = _compute_scaled_logits(logits, temperature) - norm[:, None]
    p, upstream = log_p.exp(), grad_log_probs[:, None]
    slope = -(p * upstream)
    if grad_entropy is not None:
        slope = slope - (log_p + entropy[:, None]) * grad_entropy[:, None] * p
    is_label = torch.arange(logits.shape[1], device=logits.device) == label[:, None]
    slope = torch.where(is_label, slope + upstream, slope)
    if temperature is not None:
        slope = slope / temperature[:, None]
    (logits if result is None else result).copy_(slope)


def _compute_scaled_logits(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """Return the logits, float32 at least, divided by the temperatures; may be the logits."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return x if temperature is None else x / temperature[:, None]


def _list_chunk_sizes(tokens: int, kept_tokens: int, chunk: int) -> list[int]:
    """Return the number of tokens of each chunk. The first chunk holds the kept tokens, if any.

    There is at least one chunk.
    """
    full, rest = divmod(tokens - kept_tokens, chunk)
    sizes = [kept_tokens, *[chunk] * full, rest]
    return [size for size in sizes if size] or [0]


def _map_rows(
    function: Callable[..., Any], weight: Tensor | None, logits: Tensor, *row_values: Tensor | None
) -> list[Any]:
    """Return what `function` returns: for all rows, or for one portion of them after the other.

    A GPU computes chunks in a compiled function, which makes no copies of the logits.
    """
    if _is_compiled(weight):
        return [_compile(function)(logits, *row_values)]
    rows = max(1, _PORTION_VALUES // logits.shape[1])
    return [function(*portion) for portion in _split(rows, logits, *row_values)]


def _is_compiled(weight: Tensor | None) -> bool:
    return weight is not None and weight.device.type == "cuda"


@functools.cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, compiled once for all numbers of rows above 1."""
    compiled = torch.compile(function)

    def run(*row_values: Tensor | None) -> Any:
        for values in row_values:
            if values is not None:
                torch._dynamo.maybe_mark_dynamic(values, 0)
        return compiled(*row_values)

    return run


def _split(rows: int | list[int], *tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Return so many rows of each tensor at a time, once if there are none; None stays None."""
    return zip(*(repeat(None) if tensor is None else tensor.split(rows) for tensor in tensors), strict=False)


def _reduce_over_ranks(
    group: dist.ProcessGroup, peak: Tensor, total: Tensor, weighted: Tensor, picked: Tensor, is_local: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the same numbers over the vocabulary of all ranks, from the numbers of each rank."""
    highest = peak.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group)
    below = peak - highest
    share = below.exp()
    sums = torch.stack((total * share, (weighted + below * total) * share, (picked + below) * is_local))
    dist.all_reduce(sums, group=group)
    return highest, *sums.unbind()
