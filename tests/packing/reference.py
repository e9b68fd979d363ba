"""Packing one sequence at a time: slow, and plain enough to be read as the definition."""

import torch


def padded_buffer(x, padding, layout, *, roll, fill):
    """The whole padded buffer, [1, t, ...] or [b, s, ...], before it is divided over ranks."""
    rows, begin = [], 0
    for length, padded in zip(padding.lengths, padding.padded_lengths, strict=True):
        sequence = x[begin : begin + length][roll:]
        rows.append(torch.cat((sequence, x.new_full((padded - len(sequence), *x.shape[1:]), fill))))
        begin += length
    if layout == "bshd":
        return torch.stack(rows)
    return torch.cat((*rows, x.new_full((padding.tail_rows, *x.shape[1:]), fill)))[None]


def shard_of(buffer, padding, alignment, rank):
    """What one context-parallel rank holds of a padded buffer."""
    cp = alignment.cp
    if alignment.layout == "thd":
        return torch.cat(
            [divided(s, cp, rank) for s in buffer.split(padding.padded_lengths_with_tail, dim=1)], dim=1
        )
    return divided(buffer, cp, rank)


def divided(x, cp, rank):
    if cp == 1:
        return x
    chunks = x.chunk(2 * cp, dim=1)
    return torch.cat((chunks[rank], chunks[2 * cp - 1 - rank]), dim=1)
