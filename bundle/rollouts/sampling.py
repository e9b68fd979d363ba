"""Samples answers from a causal model of transformers with a cache of keys and values, batch by batch.

`generate` of transformers returns no log-probabilities at the temperature, and its draws depend on the batch.
Here a draw depends on (seed, step, question, answer, position) alone. Equal prompts are computed once.
"""

import hashlib
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bundle.errors import JobFailed
from bundle.planning.rollout import FLOAT64_LOGITS
from bundle.rollouts import Answer, FinishReason, Request, Sampling

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Rows leave the batch when fewer than this share of them go on: to copy the cache costs about a token.
_MIN_ACTIVE_ROW_SHARE = 0.75


def draw_uniforms(sampling: Sampling, request: Request, count: int) -> "NDArray[np.float64]":
    """Return the random numbers of the first `count` positions of an answer, in [0, 1).

    They come from a counter (Philox 4x64: Salmon et al., 2011), so that no other answer changes them.
    """
    key = f"{sampling.seed}/{sampling.step}/{request.question}/{request.answer}".encode()
    digest = hashlib.blake2b(key, digest_size=16).digest()
    bits = np.random.Philox(key=int.from_bytes(digest, "little"))
    return np.random.Generator(bits).random(count)


def choose_tokens(
    logits: Tensor, temperature: float, uniforms: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the tokens [rows] and their log-probabilities [rows], float64, for logits [rows, vocabulary].

    Token i is drawn where the cumulative distribution, float64, passes the row's uniform number. Without
    `uniforms` it is the likeliest token. Raise JobFailed for logits without a distribution (NaN, inf).
    """
    log_probs = (logits.double() / temperature).log_softmax(-1)
    if uniforms is None:
        tokens = logits.argmax(-1, keepdim=True)
    else:
        cumulative = log_probs.exp().cumsum(-1)
        total = cumulative[:, -1:].contiguous()
        tokens = torch.searchsorted(cumulative, uniforms[:, None] * total, right=True)
        # By rounding the product may be the total: the last token that has a probability is drawn then.
        tokens = torch.minimum(tokens, torch.searchsorted(cumulative, total))
    chosen = log_probs.gather(-1, tokens.clamp(max=logits.shape[-1] - 1))
    if not chosen.isfinite().all():
        raise JobFailed(
            "rollout: the model's logits are not finite. Look at grad_norm and the loss of the last steps;"
            " the learning rate may be too high."
        )
    return tokens.squeeze(-1), chosen.squeeze(-1)


def sample_with_transformers(
    model: Any, requests: Sequence[Request], sampling: Sampling, *, version: int, batch_limit: int
) -> list[Answer]:
    """Return an answer to each request, in their order; at most `batch_limit` rows are computed at once.

    `model` is a causal model of transformers in evaluation mode. Prompts are sorted by length and padded on
    the left, so that answers depend on the other rows by rounding alone.
    """
    order = sorted(range(len(requests)), key=lambda number: (len(requests[number].ids), requests[number].ids))
    answers: dict[int, Answer] = {}
    for start in range(0, len(order), batch_limit):
        numbers = order[start : start + batch_limit]
        with torch.inference_mode():
            batch = _Batch(model, [requests[number] for number in numbers], sampling)
            answers.update(zip(numbers, batch.sample(version), strict=True))
    return [answers[number] for number in range(len(requests))]


class _Batch:
    """Rows that are sampled together. `rows` are the requests that the model still computes."""

    def __init__(self, model: Any, requests: Sequence[Request], sampling: Sampling) -> None:
        self._model, self._requests, self._sampling = model, requests, sampling
        # Newer releases of transformers have another name for it.
        parameters = inspect.signature(model.forward).parameters
        self._cache_keyword = "cache" if "cache" in parameters else "past_key_values"
        self._rows = torch.arange(len(requests), device=model.device)
        self._is_open = torch.ones(len(requests), dtype=torch.bool, device=model.device)
        limit = sampling.max_completion_length
        self._uniforms: Tensor | None = None
        if not sampling.greedy:
            uniforms = np.stack([draw_uniforms(sampling, request, limit) for request in requests])
            self._uniforms = torch.from_numpy(uniforms).to(model.device)

    def sample(self, version: int) -> list[Answer]:
        """Return the answers, in the order of the requests."""
        logits = self._prefill()
        stop = torch.tensor(self._sampling.stop, dtype=torch.long, device=logits.device)
        count, limit = len(self._requests), self._sampling.max_completion_length
        ids = torch.zeros(count, limit, dtype=torch.long, device=logits.device)
        log_probs = torch.zeros(count, limit, device=logits.device)
        lengths = torch.full((count,), limit, device=logits.device)
        stopped = torch.zeros(count, dtype=torch.bool, device=logits.device)
        for position in range(limit):
            tokens, chosen = self._choose(logits, position)
            ids[self._rows, position], log_probs[self._rows, position] = tokens, chosen.float()
            ending = self._is_open & torch.isin(tokens, stop)
            lengths[self._rows[ending]], stopped[self._rows[ending]] = position + 1, True
            self._is_open = self._is_open & ~ending
            if position + 1 == limit or not self._is_open.any():
                break
            logits = self._advance(tokens)
        columns = (ids.tolist(), log_probs.cpu().numpy(), lengths.tolist(), stopped.tolist())
        return [
            _build_answer(request, row[:length], values[:length].copy(), version, "stop" if end else "length")
            for request, row, values, length, end in zip(self._requests, *columns, strict=True)
        ]

    def _choose(self, logits: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Return tokens and log-probabilities of the rows; some at once, since float64 takes much memory."""
        size = max(1, FLOAT64_LOGITS // logits.shape[-1])
        uniforms = None if self._uniforms is None else self._uniforms[self._rows, position].split(size)
        pairs = [
            choose_tokens(part, self._sampling.temperature, None if uniforms is None else uniforms[number])
            for number, part in enumerate(logits.split(size))
        ]
        return torch.cat([tokens for tokens, _ in pairs]), torch.cat([chosen for _, chosen in pairs])

    def _prefill(self) -> Tensor:
        """Return the logits [rows, vocabulary] behind the prompts; compute each distinct prompt once."""
        from transformers import DynamicCache

        prompts = {
            ids: row for row, ids in enumerate(dict.fromkeys(request.ids for request in self._requests))
        }
        longest, device = max(map(len, prompts)), self._rows.device
        ids = torch.tensor(
            [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device
        )
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        mask = (torch.arange(longest, device=device) >= longest - lengths[:, None]).long()
        self._cache = DynamicCache(config=self._model.config)
        # Without a mask attention takes its causal fast path.
        self._mask = None if bool(mask.all()) else mask
        self._positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = self._forward(ids)
        copies = torch.tensor([prompts[request.ids] for request in self._requests], device=device)
        self._gather_cache_rows(copies)
        return logits[copies]

    def _advance(self, tokens: Tensor) -> Tensor:
        """Return the logits behind these tokens [rows]; rows that ended may leave before."""
        if int(self._is_open.sum()) < _MIN_ACTIVE_ROW_SHARE * len(self._rows):
            remaining = self._is_open.nonzero().squeeze(-1)
            self._gather_cache_rows(remaining)
            self._rows, self._is_open = self._rows[remaining], self._is_open[remaining]
            tokens = tokens[remaining]
        self._positions = self._positions[:, -1:] + 1
        if self._mask is not None:
            self._mask = torch.cat((self._mask, self._mask.new_ones(len(self._rows), 1)), -1)
        return self._forward(tokens[:, None])

    def _gather_cache_rows(self, indices: Tensor) -> None:
        """Take these rows of all that the model has computed, some of them more than once."""
        self._cache.reorder_cache(indices)
        self._positions = self._positions[indices]
        self._mask = None if self._mask is None else self._mask[indices]

    def _forward(self, ids: Tensor) -> Tensor:
        """Return the logits [rows, vocabulary] behind the last of these ids [rows, tokens]."""
        output = self._model(
            ids,
            attention_mask=self._mask,
            position_ids=self._positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_keyword: self._cache},
        )
        logits: Tensor = output.logits[:, -1]
        return logits


def _build_answer(
    request: Request,
    ids: Sequence[int],
    log_probs: "NDArray[np.float32]",
    version: int,
    finish_reason: FinishReason,
) -> Answer:
    versions = np.full(len(ids), version, dtype=np.int32)
    return Answer(request.question, request.answer, tuple(ids), log_probs, versions, finish_reason)
