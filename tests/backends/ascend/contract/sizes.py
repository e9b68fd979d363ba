"""The layouts of npu_fusion_attention: which dimension is what, and the same rows with heads in front."""

from dataclasses import dataclass

from torch import Tensor

LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")


@dataclass(frozen=True)
class Sizes:
    """The sizes of one call; packed input (TND) counts as one batch until it is cut."""

    batches: tuple[int, int, int]  # of query, key, value
    heads: int
    groups: int  # heads of keys and values
    queries: int
    keys: int
    value_rows: int
    head_dim: int
    key_dim: int
    value_dim: int


def sizes(query: Tensor, key: Tensor, value: Tensor, heads: int, layout: str) -> Sizes:
    """What the shapes say; in BSH and SBH heads are inferred: of keys from the width of the query's."""
    place = {letter: index for index, letter in enumerate(layout)}
    batch = place.get("B")
    batches = (1, 1, 1)
    if batch is not None:
        batches = query.shape[batch], key.shape[batch], value.shape[batch]
    row = place["T" if layout == "TND" else "S"]
    if "H" in place:
        width = query.shape[2] // heads
        groups = max(key.shape[2] // width, 1)
        found, dims = heads, (width, key.shape[2] // groups, value.shape[2] // groups)
    else:
        groups, found = key.shape[place["N"]], query.shape[place["N"]]
        dims = (query.shape[-1], key.shape[-1], value.shape[-1])
    rows = query.shape[row], key.shape[row], value.shape[row]
    return Sizes(batches, found, groups, *rows, *dims)


def heads_first(x: Tensor, layout: str, heads: int) -> Tensor:
    """[b, n, s, d] of one tensor with `heads` heads; [1, n, t, d] of packed input."""
    match layout:
        case "BNSD":
            return x
        case "BSND":
            return x.transpose(1, 2)
        case "TND":
            return x.transpose(0, 1).unsqueeze(0)
        case "BSH":
            return x.unflatten(2, (heads, -1)).transpose(1, 2)
        case _:
            return x.unflatten(2, (heads, -1)).permute(1, 2, 0, 3)


def as_given(x: Tensor, layout: str) -> Tensor:
    """The layout back from [b, n, s, d]."""
    match layout:
        case "BNSD":
            return x
        case "BSND":
            return x.transpose(1, 2)
        case "TND":
            return x.squeeze(0).transpose(0, 1)
        case "BSH":
            return x.transpose(1, 2).flatten(2)
        case _:
            return x.permute(2, 0, 1, 3).flatten(2)
