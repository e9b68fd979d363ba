"""Models that put other embeddings among those of the text."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel

from bundle.mcore import packed
from bundle.mcore.context import Slot
from bundle.mcore.signatures import known

_whole_table = Slot(False)


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


def packed_positions(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `GPTModel.forward` in which `whole_table` leaves the table of packed positions whole."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        pack = signature.bind(self, *args, **kwargs).arguments.get("packed_seq_params")
        whole = pack is not None and pack.qkv_format == "thd" and self.position_embedding_type == "mrope"
        with _whole_table.set(whole):
            return original(self, *args, **kwargs)

    return forward


def whole_table(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `get_pos_emb_on_this_cp_rank`, as rotary embeddings see it, that may leave a table whole."""

    @functools.wraps(original)
    def get_pos_emb_on_this_cp_rank(table: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return table if _whole_table.get() else original(table, *args, **kwargs)

    return get_pos_emb_on_this_cp_rank


def rows_of_the_pack(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `apply_rotary_pos_emb`, as attention sees it, for packs of multimodal positions.

    The table [t of all ranks, 1, 1, d] has a row for each token of the pack, and not for each place in a
    sequence: this rank's rows are taken and applied as those of one sequence, t [t of this rank, n, d].
    """

    @functools.wraps(original)
    def apply_rotary_pos_emb(
        t: torch.Tensor, freqs: torch.Tensor, config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        boundaries = kwargs.pop("cu_seqlens", None)
        if boundaries is None or config.mrope_section is None:
            return original(t, freqs, config, *args, cu_seqlens=boundaries, **kwargs)
        group = kwargs.get("cp_group") or parallel_state.get_context_parallel_group()
        position, begin = packed.positions(boundaries, t.shape[0], group)
        angles = freqs.index_select(0, begin + position)
        return original(t.unsqueeze(1), angles, config, *args, cu_seqlens=None, **kwargs).squeeze(1)

    return apply_rotary_pos_emb
