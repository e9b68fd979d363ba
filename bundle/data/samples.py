"""Give numbered samples as tensors, in random orders that are the same in every release of numpy."""

import functools
import hashlib
import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fractions import Fraction
from heapq import heappop, heappush
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bundle.data.processing import MediaProcessor
from bundle.data.store import Store
from bundle.packing.packing import concatenate_ranges

Ints = NDArray[np.int64]
# A run that continues a checkpoint must have the same name: another name means other orders.
ORDER_GENERATOR = "numpy.random.RandomState"
# The most parts that weights are rounded to; it keeps the pattern of a blend short.
MAX_WEIGHT_DENOMINATOR = 10**5


def draw_permutation(size: int, key: str) -> Ints:
    """Return range(size) in the random order that `key` names, read only: [size].

    numpy promises that the streams of this generator never change (NEP 19).
    """
    words = np.frombuffer(hashlib.sha256(key.encode()).digest(), np.dtype("<u4"))
    order: Ints = np.random.RandomState(words).permutation(size).astype(np.int64)
    order.flags.writeable = False
    return order


class Epochs:
    """An endless run through `size` samples, each epoch shuffled anew; `key` names the run."""

    def __init__(self, size: int, key: str) -> None:
        self._size = size
        # Every step asks for its epoch's order; an epoch may end within a step.
        self._order = functools.lru_cache(maxsize=2)(lambda epoch: draw_permutation(size, f"{key} {epoch}"))

    def select_samples(self, places: Ints) -> Ints:
        """Return the samples at these places of the run."""
        epochs, within = places // self._size, places % self._size
        samples = np.empty(len(places), np.int64)
        for epoch in np.unique(epochs).tolist():
            mask = epochs == epoch
            samples[mask] = self._order(epoch)[within[mask]]
        return samples


class Blend:
    """An endless run through data sets: next comes the one whose share lags most, of equals the first.

    That is megatron-core's rule (`build_blending_indices`): before place n, a data set of share w that was
    taken c times lags by w * max(n, 1) - c. Here shares are whole numbers: after as many places as the shares
    have parts no data set lags, and the pattern repeats. Any place is found without those before it.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        """Blend data sets of these `sizes` [samples], which are numbered one after the other."""
        exact = [Fraction(str(weight)) for weight in weights]
        exact = [weight / sum(exact) for weight in exact]
        parts = min(MAX_WEIGHT_DENOMINATOR, math.lcm(*(share.denominator for share in exact)))
        # The number of each data set's places in one `period`.
        self.shares: Ints = np.asarray([max(1, round(share * parts)) for share in exact])
        self.period = int(self.shares.sum())
        self.sizes, self._before = tuple(sizes), np.cumsum(sizes) - sizes
        run = f"training {seed}"
        runs = [run] if len(sizes) == 1 else [f"{run}, {number}" for number in range(len(sizes))]
        self._epochs = [Epochs(size, run) for size, run in zip(sizes, runs, strict=True)]
        self._owners = _assign_data_sets(
            self.shares, 2 * self.period
        )  # only the first period begins with max(n, 1)
        self._nth = np.empty(2 * self.period, np.int64)
        for owner in range(len(sizes)):
            mask = self._owners == owner
            self._nth[mask] = np.arange(mask.sum())

    def draw_samples(self, first: int, count: int) -> Ints:
        """Return the numbers of the `count` samples from place `first` on."""
        places = np.arange(first, first + count, dtype=np.int64)
        at = np.where(places < self.period, places, self.period + places % self.period)
        owners = self._owners[at]
        nth = self._nth[at] + np.maximum(0, places // self.period - 1) * self.shares[owners]
        numbers = np.empty(count, np.int64)
        for owner in np.unique(owners).tolist():
            mask = owners == owner
            numbers[mask] = self._before[owner] + self._epochs[owner].select_samples(nth[mask])
        return numbers

    def count_samples(self, places: int) -> Ints:
        """Return how many samples of each data set are at the first `places`: [data sets]."""
        cycles, rest = divmod(places, self.period)
        begin = self.period if cycles else 0
        last = np.bincount(self._owners[begin : begin + rest], minlength=len(self.shares))
        return cycles * self.shares + last


def _assign_data_sets(shares: Ints, places: int) -> Ints:
    """Return the data set of each place, from the first on."""
    owners, lag = np.empty(places, np.int64), shares.copy()
    for place in range(places):
        owner = int(lag.argmax())
        owners[place] = owner
        lag += shares if place else 0
        lag[owner] -= shares.sum()
    return owners


def choose_held_out(size: int, fraction: float, seed: int) -> NDArray[np.bool_]:
    """Return whether each of `size` pieces is held out for evaluation: [size].

    At least one is where `fraction` is not zero.
    """
    chosen = np.zeros(size, np.bool_)
    if fraction > 0:
        count = min(size, max(1, round(size * fraction)))
        chosen[draw_permutation(size, f"held out {seed}")[:count]] = True
    return chosen


DECODING_THREADS = 4  # that decode the images and videos of a micro-batch; they compute without Python's lock
BLANK_SAMPLE_NUMBER = -1  # a sample without loss, so that every rank has as many


@dataclass(frozen=True)
class Spans:
    """Pieces of the token store, [pieces] each."""

    starts: Ints
    lengths: Ints

    def __len__(self) -> int:
        return len(self.starts)

    def select(self, chosen: NDArray[np.bool_] | Ints) -> "Spans":
        """Return the chosen pieces only: by a mask in their order, or by numbers in the order of these."""
        return Spans(self.starts[chosen], self.lengths[chosen])

    def split_by_max_length(self, max_length: int) -> "Spans":
        """Return the tokens in pieces of at most `max_length`; only a document's last piece is shorter."""
        pieces = -(-self.lengths // max_length)
        owner = np.repeat(np.arange(len(self)), pieces)
        offset = concatenate_ranges(np.zeros(len(self), np.int64), pieces) * max_length
        return Spans(self.starts[owner] + offset, np.minimum(self.lengths[owner] - offset, max_length))


def pack_best_fit(lengths: Ints, capacity: int) -> list[Ints]:
    """Return the numbers of the pieces in each pack; a pack has at most `capacity` tokens.

    The longest piece is placed first, each one where it fits best. The work per piece is one bisection among
    the distinct sizes of free room. Lengths are 1 .. `capacity`.
    """
    packs: list[list[int]] = []
    free: dict[int, list[int]] = {}  # free room -> packs that have it
    sizes: list[int] = []  # the keys of `free`, sorted
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        at = bisect_left(sizes, length)
        if at == len(sizes):
            pack, left = len(packs), capacity
            packs.append([])
        else:
            left = sizes[at]
            pack = free[left].pop()
            if not free[left]:
                del free[left], sizes[at]
        packs[pack].append(piece)
        left -= length
        if left:
            if left not in free:
                insort(sizes, left)
            free.setdefault(left, []).append(pack)
    return [np.asarray(pack, np.int64) for pack in packs]


@dataclass(frozen=True)
class SampleBatch:
    """One micro-batch on the host: [b, s] each, or, packed, [1, t] with the sequences one after the other.

    `labels[.., i]` is the token after `ids[.., i]`; `loss_mask` is 1 where it is learned.

    `lengths` are the unpadded tokens of each sequence in a pack; None for rows of equal length. `row_lengths`
    [b] are the tokens of each row before its padding; None where no row has padding.

    `pixels` [patches, values] and `grids` [images, 3] belong to all its images and videos in their order.
    `seconds` [images] are their distances in time (`packing.images`).

    `documents` are the numbers of its sequences among all documents of the corpus; BLANK_SAMPLE_NUMBER for
    one of a blank sample. Pieces that go across documents have none.
    """

    ids: Tensor  # int64
    labels: Tensor  # int64
    loss_mask: Tensor  # float32
    position_ids: Tensor  # int64
    lengths: tuple[int, ...] | None = None
    row_lengths: tuple[int, ...] | None = None
    pixels: Tensor = field(default_factory=lambda: torch.zeros(0, 0))  # float32
    grids: Ints = field(default_factory=lambda: np.zeros((0, 3), np.int64))
    documents: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    seconds: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))


class SampleSizes(NamedTuple):
    """The sizes of samples: the tokens of each sequence without padding, and the patches of each image."""

    lengths: Ints  # [sequences]
    grids: Ints  # [images and videos, 3]


class Samples(Protocol):
    """Numbered samples; `build_batch` takes numbers, BLANK_SAMPLE_NUMBER among them, and returns tensors."""

    def __len__(self) -> int: ...

    def build_batch(self, numbers: Ints) -> SampleBatch:
        """Return the samples `numbers` [b] as one micro-batch."""
        ...

    def count_patches(self, numbers: Ints) -> Ints:
        """Return the patches [b] of the images and videos of each sample; tokens are padded to one size."""
        ...

    def compute_sequence_sizes(self, numbers: Ints) -> SampleSizes:
        """Return the sizes of the samples `numbers` [b], none of them blank, without reading them."""
        ...


class WindowSamples:
    """Windows of `length` tokens, one after the other through all pieces, across documents.

    Where a piece between two others was held out, the next token does not follow in the text and has no loss.
    """

    def __init__(self, store: Store, spans: Spans, length: int) -> None:
        self._ids, self._starts, self._length = store.ids, spans.starts, length
        self._before = np.cumsum(spans.lengths) - spans.lengths
        # A window reads one token more than its length: the last label.
        self._count = max(0, (int(spans.lengths.sum()) - 1) // length)

    def __len__(self) -> int:
        return self._count

    def build_batch(self, numbers: Ints) -> SampleBatch:
        """Return the samples as a micro-batch of [b, length] each."""
        places = np.maximum(numbers, 0)[:, None] * self._length + np.arange(self._length + 1)
        piece = np.searchsorted(self._before, places, side="right") - 1
        in_store = self._starts[piece] + places - self._before[piece]
        return _build_batch(numbers, self._ids[in_store], np.diff(in_store) == 1, np.arange(self._length))

    def count_patches(self, numbers: Ints) -> Ints:
        """Return zeros: text has no images."""
        return np.zeros_like(numbers)

    def compute_sequence_sizes(self, numbers: Ints) -> SampleSizes:
        """Return one length for each."""
        return SampleSizes(np.full(len(numbers), self._length, np.int64), np.zeros((0, 3), np.int64))


class RowSamples:
    """One sequence per sample, or several that stay together, filled up with `padding` that has no loss."""

    def __init__(
        self,
        store: Store,
        spans: Spans,
        length: int,
        padding: int,
        *,
        documents_per_sample: int = 1,
        first_document: int = 0,
        processor: MediaProcessor | None = None,
    ) -> None:
        """Make a sample of `documents_per_sample` sequences each.

        `first_document` is the number of the store's first document.
        """
        self._store, self._spans, self._length, self._padding = store, spans, length, padding
        self._documents_per_sample, self._first_document, self._processor = (
            documents_per_sample,
            first_document,
            processor,
        )

    def __len__(self) -> int:
        return len(self._spans) // self._documents_per_sample

    def build_batch(self, numbers: Ints) -> SampleBatch:
        """Return the samples as a micro-batch of [b * documents_per_sample, length] each."""
        numbers = list_sample_sequences(numbers, self._documents_per_sample)
        rows, within = self._spans.select(np.maximum(numbers, 0)), np.arange(self._length + 1)
        real = within < rows.lengths[:, None]
        places = np.minimum(rows.starts[:, None] + within, len(self._store.ids) - 1)
        ids = np.where(real, self._store.ids[places], self._padding)
        batch = _build_batch(numbers, ids, (real & read_loss_mask(self._store, places))[:, 1:], within[:-1])
        documents = _find_span_document_numbers(self._store, rows, self._first_document, numbers)
        batch = replace(batch, row_lengths=tuple(rows.lengths.tolist()), documents=documents)
        return _with_images(batch, self._store, rows, self._processor)

    def count_patches(self, numbers: Ints) -> Ints:
        """Return the patches of each sample's sequences; a blank sample is the first one without loss."""
        rows = self._spans.select(list_sample_sequences(np.maximum(numbers, 0), self._documents_per_sample))
        patches: Ints = (
            _count_document_patches(self._store, rows).reshape(-1, self._documents_per_sample).sum(1)
        )
        return patches

    def compute_sequence_sizes(self, numbers: Ints) -> SampleSizes:
        """Return the sizes of the samples' sequences."""
        return _compute_sizes(
            self._store, self._spans.select(list_sample_sequences(numbers, self._documents_per_sample))
        )


class VariableLengthPackSamples:
    """Several whole sequences per sample; one sample is a micro-batch."""

    def __init__(
        self,
        store: Store,
        spans: Spans,
        packs: list[Ints],
        *,
        first_document: int = 0,
        processor: MediaProcessor | None = None,
    ) -> None:
        """Take the sequences of each pack from `packs`.

        `first_document` is the number of the store's first document.
        """
        self._store, self._spans, self._packs, self._first_document = store, spans, packs, first_document
        self._processor = processor

    def __len__(self) -> int:
        return len(self._packs)

    def build_batch(self, numbers: Ints) -> SampleBatch:
        """Return the one pack in `numbers` as a micro-batch of [1, t] each; t is the number of its tokens."""
        spans = self._spans.select(self._packs[max(int(numbers[0]), 0)])
        places = concatenate_ranges(spans.starts, spans.lengths)
        learned = np.roll(read_loss_mask(self._store, places), -1)
        learned[np.cumsum(spans.lengths) - 1] = False  # the last token of a sequence has none after it
        ids = self._store.ids[np.append(places, places[0])]
        positions = concatenate_ranges(np.zeros(len(spans), np.int64), spans.lengths)
        batch = _build_batch(numbers, ids[None], learned[None], positions, tuple(spans.lengths.tolist()))
        batch = replace(
            batch, documents=_find_span_document_numbers(self._store, spans, self._first_document, numbers)
        )
        return _with_images(batch, self._store, spans, self._processor)

    def count_patches(self, numbers: Ints) -> Ints:
        """Return the patches of each pack's sequences."""
        packs = [self._spans.select(self._packs[number]) for number in np.maximum(numbers, 0).tolist()]
        return np.asarray([_count_document_patches(self._store, spans).sum() for spans in packs], np.int64)

    def compute_sequence_sizes(self, numbers: Ints) -> SampleSizes:
        """Return the sizes of the packs' sequences."""
        sequences = np.concatenate([self._packs[number] for number in numbers.tolist()])
        return _compute_sizes(self._store, self._spans.select(sequences))


class ConcatenatedSamples:
    """Samples of several data sets, numbered one after the other."""

    def __init__(self, parts: Sequence[Samples]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def build_batch(self, numbers: Ints) -> SampleBatch:
        """Return the samples in their order, each from its own data set; a pack must come alone."""
        owners = np.searchsorted(self._ends, np.maximum(numbers, 0), side="right").tolist()
        begins = [int(self._ends[owner]) - len(self._parts[owner]) for owner in owners]
        # BLANK_SAMPLE_NUMBER is of the first data set, which begins at 0, and stays what it is.
        numbers_by_owner = zip(owners, numbers.tolist(), begins, strict=True)
        batches = [
            self._parts[owner].build_batch(np.asarray([number - begin]))
            for owner, number, begin in numbers_by_owner
        ]
        columns = zip(*((b.ids, b.labels, b.loss_mask, b.position_ids) for b in batches), strict=True)
        ids, labels, loss_mask, positions = map(torch.cat, columns)
        documents = np.concatenate([batch.documents for batch in batches])
        grids, seconds = (
            np.concatenate([getattr(b, name) for b in batches]) for name in ("grids", "seconds")
        )
        filled = tuple(chain.from_iterable(batch.row_lengths or () for batch in batches)) or None
        joined_batch = SampleBatch(
            ids, labels, loss_mask, positions, batches[0].lengths, filled, documents=documents
        )
        return replace(
            joined_batch, pixels=torch.cat([b.pixels for b in batches]), grids=grids, seconds=seconds
        )

    def count_patches(self, numbers: Ints) -> Ints:
        """Return the patches of each sample, as its own data set counts them."""
        owners = np.searchsorted(self._ends, np.maximum(numbers, 0), side="right")
        patch_counts = np.zeros_like(numbers)
        for owner in np.unique(owners).tolist():
            part, mask = self._parts[owner], owners == owner
            patch_counts[mask] = part.count_patches(
                np.maximum(numbers[mask], 0) - (int(self._ends[owner]) - len(part))
            )
        return patch_counts

    def compute_sequence_sizes(self, numbers: Ints) -> SampleSizes:
        """Return the sizes from each data set, one data set after the other."""
        owners = np.searchsorted(self._ends, numbers, side="right")
        part_sizes = [
            self._parts[owner].compute_sequence_sizes(
                numbers[owners == owner] - (int(self._ends[owner]) - len(self._parts[owner]))
            )
            for owner in np.unique(owners).tolist()
        ]
        lengths, grids = map(np.concatenate, zip(*part_sizes, strict=True))
        return SampleSizes(lengths, grids)


def join_samples(parts: Sequence[Samples]) -> Samples:
    """Return the samples of all parts as one."""
    return parts[0] if len(parts) == 1 else ConcatenatedSamples(parts)


def list_balanced_group_members(costs: Ints, groups: int) -> Ints:
    """Return the pieces that each of `groups` gets, the same number for all: [groups, pieces].

    The most costly pieces come first. Each goes to the group with the least cost so far that has room.
    """
    size = len(costs) // groups
    group_pieces: list[list[int]] = [[] for _ in range(groups)]
    least = [(0, group) for group in range(groups)]  # a heap
    for piece in np.argsort(-costs, kind="stable").tolist():
        cost, group = heappop(least)
        group_pieces[group].append(piece)
        if len(group_pieces[group]) < size:
            heappush(least, (cost + int(costs[piece]), group))
    return np.asarray(group_pieces, np.int64)


def list_sample_sequences(numbers: Ints, documents_per_sample: int) -> Ints:
    """Return the sequences of samples with `documents_per_sample` each; a blank sample's are blank."""
    within = numbers[:, None] * documents_per_sample + np.arange(documents_per_sample)
    return np.where(numbers[:, None] == BLANK_SAMPLE_NUMBER, BLANK_SAMPLE_NUMBER, within).ravel()


def _find_span_document_numbers(store: Store, spans: Spans, first_document: int, numbers: Ints) -> Ints:
    """Return the numbers of the documents that hold these pieces; BLANK_SAMPLE_NUMBER for a blank sample."""
    return np.where(
        numbers == BLANK_SAMPLE_NUMBER, BLANK_SAMPLE_NUMBER, first_document + _find_documents(store, spans)
    )


def _find_documents(store: Store, spans: Spans) -> Ints:
    """Return the places in the store of the documents that hold these pieces: [pieces]."""
    owners: Ints = np.searchsorted(store.document_starts, spans.starts, side="right") - 1
    return owners


def _count_document_patches(store: Store, spans: Spans) -> Ints:
    """Return the patches of the documents that hold these pieces: [pieces]."""
    return (
        np.zeros(len(spans), np.int64)
        if store.pictures is None
        else store.pictures.document_patch_counts[_find_documents(store, spans)]
    )


def _compute_sizes(store: Store, spans: Spans) -> SampleSizes:
    """Return the sizes of these pieces, with the images of the documents that hold them."""
    pictures = store.pictures
    if pictures is None:
        return SampleSizes(spans.lengths, np.zeros((0, 3), np.int64))
    return SampleSizes(spans.lengths, pictures.grids[pictures.find_pictures(_find_documents(store, spans))])


def read_loss_mask(store: Store, places: Ints) -> NDArray[np.bool_]:
    """Return whether each of these tokens of the store is learned."""
    return np.ones(places.shape, np.bool_) if store.loss_mask is None else store.loss_mask[places]


def _with_images(
    batch: SampleBatch, store: Store, spans: Spans, processor: MediaProcessor | None
) -> SampleBatch:
    """Return the batch of whole documents with their images and videos, decoded by several threads."""
    if store.pictures is None or processor is None:
        return batch
    pictures, numbers = store.pictures, store.pictures.find_pictures(_find_documents(store, spans))
    if not len(numbers):
        return batch
    with ThreadPoolExecutor(min(DECODING_THREADS, len(numbers))) as threads:
        patches = list(
            threads.map(processor.extract_patches, map(pictures.read_encoded_picture, numbers.tolist()))
        )
    pixels = torch.from_numpy(np.concatenate(patches))
    return replace(
        batch, pixels=pixels, grids=pictures.grids[numbers], seconds=pictures.seconds_per_patch[numbers]
    )


def _build_batch(
    numbers: Ints,
    ids: NDArray[Any],
    label_mask: NDArray[np.bool_],
    positions: Ints,
    lengths: tuple[int, ...] | None = None,
) -> SampleBatch:
    """Return the samples `numbers` [b] of ids [b, s + 1] as a micro-batch.

    `label_mask` [b, s] says which labels are learned; no label of a blank sample is.
    """
    loss_mask = label_mask & (numbers != BLANK_SAMPLE_NUMBER)[:, None]
    return SampleBatch(
        torch.from_numpy(ids[:, :-1].astype(np.int64)),
        torch.from_numpy(ids[:, 1:].astype(np.int64)),
        torch.from_numpy(loss_mask.astype(np.float32)),
        torch.from_numpy(np.tile(positions, (len(ids), 1))),
        lengths,
    )
