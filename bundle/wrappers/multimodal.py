"""Models that put other embeddings among those of the text."""

import functools
import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel

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
        packed = signature.bind(self, *args, **kwargs).arguments.get("packed_seq_params")
        whole = packed is not None and packed.qkv_format == "thd" and self.position_embedding_type == "mrope"
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
        rows = _own_rows(boundaries.tolist(), group.size(), group.rank()).to(freqs.device)
        return original(t.unsqueeze(1), freqs[rows], config, *args, cu_seqlens=None, **kwargs).squeeze(1)

    return apply_rotary_pos_emb


def _own_rows(boundaries: list[int], ranks: int, rank: int) -> torch.Tensor:
    """The places in the pack of the two chunks that a rank holds of each sequence."""
    rows = []
    for start, end in pairwise(boundaries):
        length = (end - start) // (2 * ranks) if ranks > 1 else end - start
        last = end - (rank + 1) * length
        rows.append(torch.arange(start + rank * length, start + (rank + 1) * length))
        rows.append(torch.arange(last, last + length if ranks > 1 else last))
    return torch.cat(rows)
