"""Answers by transformers in this process: no server, no checkpoint on the disk."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bundle.architectures import Architecture
from bundle.errors import JobFailed, UsageError
from bundle.planning.rollout import MOST_ROWS
from bundle.rollouts import Answer, Request, Sampling
from bundle.rollouts.sampling import sample_with_transformers
from bundle.rollouts.twins import TransformersModelBuilder


class TransformersRollout:
    """A rollout engine with a model of transformers (`Rollout`).

    `version` is that of its weights, None before the first sync. `ignored_names` are the tensors of the last
    sync that this engine has no use for, those of MTP layers.
    """

    can_recover_by_resync = False

    def __init__(
        self,
        config: Mapping[str, Any],
        architecture: Architecture,
        *,
        dtype: torch.dtype,
        device: torch.device,
        batch_limit: int = MOST_ROWS,
    ) -> None:
        """`config` is the Hugging Face config; `batch_limit` are the rows that are sampled at once.

        Raise UsageError where transformers has no class for the config, EnvironmentUnfit without it.
        """
        if batch_limit < 1:
            raise UsageError(f"rl.rollout.batch_limit: {batch_limit} is not allowed. Set it to 1 or more.")
        self._builder = TransformersModelBuilder(config, architecture, dtype, device)
        self._device, self._vocab_size = device, architecture.vocab_size
        self._batch_limit = batch_limit
        self._model: Any = None
        self.version: int | None = None
        self.ignored_names: tuple[str, ...] = ()

    @property
    def synced_model(self) -> Any:
        """The model that answers. Raise JobFailed before the first sync and after `close`."""
        if self._model is None:
            raise JobFailed("rollout: the engine has no weights. Call sync before generate.")
        return self._model

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Answer]:
        """Return an answer to each request, in their order.

        Raise JobFailed without weights, UsageError for prompts that the model cannot read.
        """
        model = self.synced_model
        assert self.version is not None
        self._check_prompt_ids_in_vocabulary(requests)
        return sample_with_transformers(
            model, requests, sampling, version=self.version, batch_limit=self._batch_limit
        )

    def sync(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Answer with copies of these published tensors from now on.

        All of them are read before anything is checked, so that ranks that send them need not wait. Raise
        JobFailed for tensors that do not fit; after any error the old weights answer.
        """
        weights: dict[str, Tensor] = {}
        repeated, ignored = [], []
        for name, tensor in tensors:
            if name in self._builder.mtp_names:
                ignored.append(name)
                continue
            if name in weights:
                repeated.append(f"repeated: {name}")
            weights[name] = tensor.detach().to(self._device, copy=True).contiguous()
        if repeated:
            raise JobFailed("rollout: a tensor was sent twice. Send each tensor once.", repeated)
        old_model, self._model = self._model, self._builder.build(weights)
        self.version, self.ignored_names = version, tuple(ignored)
        if old_model is not None:
            self._builder.recycle_model(old_model)

    def release_cache_until_sync(self) -> None:
        """Do nothing: the weights stay."""

    def close(self) -> None:
        """Release the weights; `generate` raises until the next sync."""
        self._model, self.version = None, None

    def _check_prompt_ids_in_vocabulary(self, requests: Sequence[Request]) -> None:
        """Raise UsageError with the questions that hold no token, or one that the model has not."""
        empty = [f"question {request.question}: it has no tokens" for request in requests if not request.ids]
        foreign = [
            f"question {request.question}: token {token} is outside the vocabulary (size {self._vocab_size})"
            for request in requests
            for token in sorted({min(request.ids, default=0), max(request.ids, default=0)})
            if not 0 <= token < self._vocab_size
        ]
        if problems := list(dict.fromkeys(empty + foreign)):
            raise UsageError(
                "data.tokenizer: the model cannot read these questions. Use the tokenizer of the model.",
                problems,
            )
