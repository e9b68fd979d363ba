"""Makes micro-batches of a step's answers: packs or rows, divided among data-parallel ranks by length."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bundle.data.samples import Ints, list_balanced_group_members, pack_best_fit
from bundle.engine import MicroBatch
from bundle.engine.microbatch import from_packing
from bundle.mcore.groups import Groups
from bundle.packing.packing import Packing, compute_starts, concatenate_ranges
from bundle.recipe import Recipe
from bundle.rl.advantages import split_by_answer
from bundle.transfers import copy_to_device

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Experience:
    """Questions with their answers, one sequence after the other: ids [tokens], lengths [sequences].

    `answer_lengths` [sequences] count the tokens behind the question. `values` [tokens] belong to labels:
    the value of an answer token is at the token before it. Elsewhere they are 0.
    """

    ids: Ints
    lengths: Ints
    answer_lengths: Ints
    values: Mapping[str, Floats] = field(default_factory=dict)

    @classmethod
    def from_answers(
        cls, questions: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
    ) -> "Experience":
        """Return each question followed by its answer; both are ids [sequences][tokens]."""
        answer_lengths = np.fromiter(map(len, answers), np.int64, len(answers))
        lengths = np.fromiter(map(len, questions), np.int64, len(questions)) + answer_lengths
        pairs = chain.from_iterable(zip(questions, answers, strict=True))
        ids = np.fromiter(chain.from_iterable(pairs), np.int64, int(lengths.sum()))
        return cls(ids, lengths, answer_lengths)

    def with_values(self, **values: Sequence[NDArray[Any]]) -> "Experience":
        """Return a copy with more values; each is a list of arrays [answer tokens], one for each sequence."""
        spread = {}
        for name, arrays in values.items():
            spread[name] = np.zeros(len(self.ids), np.float32)
            spread[name][self.answer_label_indices] = np.concatenate(arrays)
        return replace(self, values={**self.values, **spread})

    def extract_answer_values(self, values: Floats) -> list[Floats]:
        """Return the values of the answers, [answer tokens] for each sequence, out of `values` [tokens]."""
        return split_by_answer(values[self.answer_label_indices], self.answer_lengths)

    @cached_property
    def answer_label_indices(self) -> Ints:
        """The indices of the tokens whose label is a token of an answer, [answer tokens of all sequences]."""
        ends = compute_starts(self.lengths) + self.lengths
        return concatenate_ranges(ends - self.answer_lengths - 1, self.answer_lengths)

    @cached_property
    def labels(self) -> Ints:
        """The token after each token, [tokens]; after the last one of a sequence it has no meaning."""
        return np.roll(self.ids, -1)

    @cached_property
    def loss_mask(self) -> Floats:
        """1 where the label is a token of an answer, else 0, [tokens]."""
        mask = np.zeros(len(self.ids), np.float32)
        mask[self.answer_label_indices] = 1
        return mask


@dataclass(frozen=True)
class BatchPlan:
    """The indices of the sequences in each micro-batch of this rank; every rank has equally many.

    The index after that of the last sequence stands for padding. `length` [tokens] is the padded length of
    all micro-batches, None where each has its own.
    """

    micro_batches: tuple[Ints, ...]
    length: int | None


class BatchBuilder:
    """Makes the micro-batches of this rank."""

    def __init__(self, recipe: Recipe, groups: Groups, device: torch.device, temperature: float) -> None:
        """`temperature` divides the logits of all tokens."""
        self._recipe, self._groups, self._device = recipe, groups, device
        self._temperature = temperature

    def plan(self, lengths: Ints, numbers: Ints) -> BatchPlan:
        """Return the plan for the sequences `numbers`, by index; sequence i has lengths[i] tokens."""
        recipe, dp, pp = self._recipe, self._groups.dp, self._groups.pp
        multiple = recipe.alignment.sequence_multiple
        padded = -(-lengths[numbers] // multiple) * multiple
        padding = len(lengths)
        if recipe.data.packed:
            bins = pack_best_fit(padded, recipe.data.sequence_length // multiple * multiple)
        else:
            size = recipe.train.micro_batch_size_or_one
            by_length = np.argsort(-padded, kind="stable")
            bins = [by_length[first : first + size] for first in range(0, len(by_length), size)]
        costs = np.array([padded[rows].sum() for rows in bins], np.int64)
        # Interleaved pipeline stages need a multiple of pp micro-batches.
        count = -(-max(1, len(bins)) // (dp.size * (pp.size if self._groups.vpp > 1 else 1)))
        count *= pp.size if self._groups.vpp > 1 else 1
        missing = count * dp.size - len(bins)
        share = list_balanced_group_members(np.concatenate([costs, np.zeros(missing, np.int64)]), dp.size)[
            dp.rank
        ]
        micro_batches = [numbers[bins[number]] if number < len(bins) else numbers[:0] for number in share]
        rows = 1 if recipe.data.packed else recipe.train.micro_batch_size_or_one
        filled = tuple(
            np.concatenate([sequences, np.full(max(0, rows - len(sequences)), padding)])
            for sequences in micro_batches
        )
        length = None
        if pp.size > 1:
            length = int(costs.max(initial=multiple) if recipe.data.packed else padded.max(initial=multiple))
        return BatchPlan(filled, length)

    def build(self, experience: Experience, plan: BatchPlan, values: Sequence[str] = ()) -> list[MicroBatch]:
        """Return the micro-batches of a plan; `values` names those that become their extra tensors."""
        names = {name: experience.values[name] for name in values}
        columns: list[NDArray[Any]] = [
            experience.ids,
            experience.labels,
            experience.loss_mask,
            *names.values(),
        ]
        # Padding is a token 0 after all others.
        padded = [torch.from_numpy(np.append(column, column.dtype.type(0))) for column in columns]
        micro_batches = []
        for places, lengths in find_token_indices_and_lengths(experience, plan):
            ids, labels, mask, *rest = (copy_to_device(column[places], self._device) for column in padded)
            micro_batches.append(
                from_packing(
                    ids,
                    labels,
                    mask,
                    self._build_packing(lengths, plan.length),
                    mtp_layers=self._recipe.architecture.mtp_layers,
                    mean=self._recipe.loss_mean,
                    temperatures=self._fill_temperatures(len(lengths)),
                    extra_tensors=dict(zip(names, rest, strict=True)),
                )
            )
        return micro_batches

    def _build_packing(self, lengths: Ints, length: int | None) -> Packing:
        return Packing.from_lengths(
            lengths.tolist(),
            self._recipe.alignment,
            rank=self._groups.cp.rank,
            length=length,
            device=self._device,
        )

    def _fill_temperatures(self, sequences: int) -> torch.Tensor | None:
        if self._temperature == 1:
            return None
        return torch.full((sequences,), self._temperature, device=self._device)


def find_token_indices_and_lengths(experience: Experience, plan: BatchPlan) -> Iterator[tuple[Ints, Ints]]:
    """Yield the indices of the tokens of each micro-batch, and the lengths [tokens] of its sequences.

    A padding sequence is one token, whose index is that after the last token.
    """
    starts = np.append(compute_starts(experience.lengths), len(experience.ids))
    all_lengths = np.append(experience.lengths, 1)
    for sequences in plan.micro_batches:
        lengths = all_lengths[sequences]
        yield concatenate_ranges(starts[sequences], lengths), lengths
