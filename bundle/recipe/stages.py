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

from bundle.errors import format_count

# Letters of a layout written out: more than any model known has, and nothing to hold in memory.
MAX_LAYOUT_LETTERS = 2**16

_LETTER_PATTERN = r"[EtmL|](?:\*[0-9]+)?"
_LAYOUT_TOKEN_PATTERN = re.compile(rf"({_LETTER_PATTERN})|\((,*(?:{_LETTER_PATTERN},*)+)\)\*([0-9]+)|,")
_LETTER_WITH_FACTOR_PATTERN = re.compile(r"([EtmL|])(?:\*([0-9]+))?")


class ChunkContents(NamedTuple):
    """The contents of one model chunk of a pipeline stage; `layers` are the decoder's."""

    layers: int
    embedding: bool = False
    mtp_layers: int = 0
    head: bool = False


def parse_layout(layout: str) -> tuple[str, ...]:
    """Return the stages of a layout string, each with its letters written out (`Ettt`).

    Raise ValueError, which says why the string cannot be read.
    """
    position = 0
    parts: list[str] = []
    while (part := _LAYOUT_TOKEN_PATTERN.match(layout, position)) is not None:
        letter, group, times = part.groups()
        parts.append(
            _repeat_letters(_expand_letter_factors(group), times)
            if group
            else _expand_letter_factors(letter or "")
        )
        if sum(map(len, parts)) > MAX_LAYOUT_LETTERS:
            raise ValueError(_TOO_MANY_LETTERS_MESSAGE)
        position = part.end()
    if position < len(layout):
        raise ValueError(
            f"from character {position + 1} on, {layout[position : position + 12]!r} is not part of a layout."
            " Write E, t, m, L and |, each with or without a factor (t*3), or groups with a factor ((tt|)*29)"
        )
    return tuple("".join(parts).split("|"))


_TOO_MANY_LETTERS_MESSAGE = f"the expanded layout has more than {MAX_LAYOUT_LETTERS} letters"


def _expand_letter_factors(letters: str) -> str:
    return "".join(
        _repeat_letters(letter, times or "1")
        for letter, times in _LETTER_WITH_FACTOR_PATTERN.findall(letters)
    )


def _repeat_letters(letters: str, times: str) -> str:
    factor = int(times) if len(times) < 9 else MAX_LAYOUT_LETTERS + 1
    if len(letters) * factor > MAX_LAYOUT_LETTERS:
        raise ValueError(_TOO_MANY_LETTERS_MESSAGE)
    return letters * factor


def count_rounds(stages: Sequence[str], pp: int) -> int | None:
    """Return how many chunks each of `pp` pipeline ranks has; None where the stages do not divide evenly."""
    return None if len(stages) % pp else len(stages) // pp


def assign_stages(stages: Sequence[str], pp: int) -> tuple[tuple[ChunkContents, ...], ...]:
    """Return the contents of each rank's chunks for stages without `find_stage_violations`."""
    contents = [
        ChunkContents(
            layers=stage.count("t"), embedding="E" in stage, mtp_layers=stage.count("m"), head="L" in stage
        )
        for stage in stages
    ]
    return tuple(tuple(contents[rank::pp]) for rank in range(pp))


def divide_stages_into_chunks(
    lengths: Sequence[int], rounds: int, mtp_layers: int
) -> tuple[tuple[ChunkContents, ...], ...]:
    """Return the contents of each rank's chunks for stages with these numbers of layers.

    Each stage is divided evenly into its chunks of `rounds`.
    """
    last = len(lengths) - 1, rounds - 1

    def build_contents(rank: int, chunk: int) -> ChunkContents:
        head = (rank, chunk) == last
        return ChunkContents(lengths[rank] // rounds, rank == chunk == 0, mtp_layers if head else 0, head)

    return tuple(
        tuple(build_contents(rank, chunk) for chunk in range(rounds)) for rank in range(len(lengths))
    )


def find_stage_violations(stages: Sequence[str], pp: int, *, layers: int, mtp_layers: int) -> Iterator[str]:
    """Yield what is wrong with stages for a model of `layers` decoder layers and `mtp_layers` behind them."""
    letters = "".join(stages)
    if count_rounds(stages, pp) is None:
        yield f"the number of stages, {len(stages)}, is not a multiple of pp {pp}"
    for number, stage in enumerate(stages, start=1):
        if not stage:
            yield f"stage {number} of {len(stages)} is empty: nothing would be trained there"
    if letters.count("E") != 1 or not stages[0].startswith("E"):
        yield "E, the embedding, must occur once, as the first letter"
    if letters.count("L") != 1 or not stages[-1].endswith("L"):
        yield "L, the head with the losses, must occur once, as the last letter"
    if letters.count("t") != layers:
        count = format_count(letters.count("t"), "decoder layer")
        yield f"the layout has {count} (t), but the model has {layers}"
    if letters.count("m") != mtp_layers:
        yield f"the layout has {letters.count('m')} MTP layers (m), but model.mtp.layers is {mtp_layers}"
    if "t" in letters.partition("m")[2]:
        yield "an MTP layer (m) precedes a decoder layer (t). Write every m after all t"
    mtp_stages = [number for number, stage in enumerate(stages) if "m" in stage]
    if len(mtp_stages) > 1:
        yield "the MTP layers (m) are in several stages, but megatron-core builds them in one"
    is_even = count_rounds(stages, pp) is not None
    if is_even and mtp_stages and (mtp_stages[0] < len(stages) - pp or mtp_stages[0] % pp == 0):
        yield (
            f"stage {mtp_stages[0] + 1} of {len(stages)} has MTP layers (m), but megatron-core builds them"
            f" only in the last {pp} stages, and not on the first pipeline rank"
        )
