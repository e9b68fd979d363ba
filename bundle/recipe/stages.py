"""The stages of a pipeline as megatron-core's layout string says them, such as `Et*3|(tt|)*29,m|L`.

E is the embedding, t a layer of the decoder, m one of multi-token prediction (MTP), L the head with the
losses; `|` ends a stage, `t*3` are three layers, `(tt|)*29` is a group 29 times; commas are for people.
Stages are dealt out to the ranks of the pipeline in rounds, a chunk of each rank a round.

Source: megatron/core/transformer/pipeline_parallel_layer_layout.py, whose expressions replace text: what they
read otherwise than it looks (`(t)*2*3` is four layers, `t*1,0` ten) is refused here.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Letters of a layout written out: more than any model known has, and nothing to hold in memory.
MOST = 2**16

_ONE = r"[EtmL|](?:\*[0-9]+)?"
_PART = re.compile(rf"({_ONE})|\((,*(?:{_ONE},*)+)\)\*([0-9]+)|,")
_REPEATED = re.compile(r"([EtmL|])(?:\*([0-9]+))?")


class Held(NamedTuple):
    """What one model chunk of a pipeline stage holds; `layers` of the decoder."""

    layers: int
    embedding: bool = False
    mtp_layers: int = 0
    head: bool = False


def parsed(layout: str) -> tuple[str, ...]:
    """The stages of a layout string, each its letters written out (`Ettt`).

    ValueError: where it cannot be read, and why.
    """
    at = 0
    parts: list[str] = []
    while (part := _PART.match(layout, at)) is not None:
        one, group, times = part.groups()
        parts.append(_times(_written_out(group), times) if group else _written_out(one or ""))
        if sum(map(len, parts)) > MOST:
            raise ValueError(_TOO_LONG)
        at = part.end()
    if at < len(layout):
        raise ValueError(
            f"from character {at + 1} on, {layout[at : at + 12]!r}, it is no layout: that has the letters"
            " E, t, m, L and |, each with or without a factor (t*3), and groups of these with one, (tt|)*29"
        )
    return tuple("".join(parts).split("|"))


_TOO_LONG = f"written out it has more than {MOST} letters"


def _written_out(letters: str) -> str:
    return "".join(_times(letter, times or "1") for letter, times in _REPEATED.findall(letters))


def _times(letters: str, times: str) -> str:
    factor = int(times) if len(times) < 9 else MOST + 1
    if len(letters) * factor > MOST:
        raise ValueError(_TOO_LONG)
    return letters * factor


def rounds(stages: Sequence[str], pp: int) -> int | None:
    """How many chunks each of `pp` ranks of a pipeline has; None: they do not share the stages evenly."""
    return None if len(stages) % pp else len(stages) // pp


def dealt(stages: Sequence[str], pp: int) -> tuple[tuple[Held, ...], ...]:
    """What each rank's chunks hold, for stages that `misplaced` has nothing against."""
    held = [
        Held(layers=stage.count("t"), embedding="E" in stage, mtp_layers=stage.count("m"), head="L" in stage)
        for stage in stages
    ]
    return tuple(tuple(held[rank::pp]) for rank in range(pp))


def shared_out(lengths: Sequence[int], rounds: int, mtp_layers: int) -> tuple[tuple[Held, ...], ...]:
    """The same for stages of so many layers, each divided evenly into its chunks of `rounds`."""
    last = len(lengths) - 1, rounds - 1

    def held(rank: int, chunk: int) -> Held:
        head = (rank, chunk) == last
        return Held(lengths[rank] // rounds, rank == chunk == 0, mtp_layers if head else 0, head)

    return tuple(tuple(held(rank, chunk) for chunk in range(rounds)) for rank in range(len(lengths)))


def misplaced(stages: Sequence[str], pp: int, *, layers: int, mtp_layers: int) -> Iterator[str]:
    """Everything against stages of a model with `layers` in its decoder and `mtp_layers` behind them."""
    every = "".join(stages)
    if rounds(stages, pp) is None:
        yield f"{len(stages)} stages are no multiple of pp {pp}"
    for number, stage in enumerate(stages, start=1):
        if not stage:
            yield f"stage {number} of {len(stages)} is empty: nothing would be trained there"
    if every.count("E") != 1 or not stages[0].startswith("E"):
        yield "E, the embedding, must stand once, at the very beginning"
    if every.count("L") != 1 or not stages[-1].endswith("L"):
        yield "L, the head with the losses, must stand once, at the very end"
    if every.count("t") != layers:
        yield f"{every.count('t')} layers of the decoder (t), and the model has {layers}"
    if every.count("m") != mtp_layers:
        yield f"{every.count('m')} MTP layers (m), and model.mtp.layers is {mtp_layers}"
    if "t" in every.partition("m")[2]:
        yield "an MTP layer (m) stands before a layer of the decoder (t): all m come after all t"
    predicting = [number for number, stage in enumerate(stages) if "m" in stage]
    if len(predicting) > 1:
        yield "the MTP layers (m) are in several stages: megatron-core builds them in one"
    even = rounds(stages, pp) is not None
    if even and predicting and (predicting[0] < len(stages) - pp or predicting[0] % pp == 0):
        yield (
            f"stage {predicting[0] + 1} of {len(stages)} has MTP layers (m): megatron-core builds them in the"
            f" last round, which are the last {pp} stages, and not on its first rank"
        )
