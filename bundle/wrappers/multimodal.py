"""Models that put other embeddings among those of the text."""

import functools
from collections.abc import Callable
from typing import Any

from megatron.core import tensor_parallel

from bundle.mcore.signatures import known


def scattered_embeddings(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `MultiTokenPredictionBlock.forward` that shares out embeddings as the model's input is.

    An embedding that leaves the whole sequence on every rank, so that others can be put into it, does so
    for the prediction layers too, whose hidden states are shared out between sequence-parallel ranks.
    """

    @functools.wraps(original)
    def forward(self: Any, *args: Any, embedding: Any = None, **kwargs: Any) -> Any:
        if not self.config.sequence_parallel or getattr(embedding, "scatter_to_sequence_parallel", True):
            return original(self, *args, embedding=embedding, **kwargs)
        scatter = tensor_parallel.scatter_to_sequence_parallel_region
        group = known(scatter, group=getattr(embedding, "tp_group", None))

        @functools.wraps(embedding)
        def embed(*ids: Any, **named: Any) -> Any:
            return scatter(embedding(*ids, **named), **group)

        return original(self, *args, embedding=embed, **kwargs)

    return forward
