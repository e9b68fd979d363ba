"""A recipe's data section made into numbered samples for training and evaluation, and what that comes to."""

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bundle.data.cache import stored
from bundle.data.processing import Processing
from bundle.data.samples import (
    ORDER,
    Batch,
    Blend,
    Packs,
    Rows,
    Samples,
    Spans,
    Windows,
    best_fit,
    held_out,
    joined,
    learned_at,
    members,
)
from bundle.data.sources import SHOWN
from bundle.data.store import Progress, Store
from bundle.data.tokenizers import Bytes, Learned, Numbers, Tokenizer, Tokens, tokenizer
from bundle.errors import UsageError
from bundle.files import json_digest
from bundle.planning.datafiles import MEGATRON, STDLIB, expand, interpreter
from bundle.recipe import Recipe, with_steps
from bundle.recipe.data import BYTE_VOCABULARY

# Running text is held out in pieces of this many sequences: small enough for an even sample.
SEQUENCES_PER_PIECE = 16
# Packed sequences are given room in these multiples, so that packs are the same at cp 1, 2, 4 and 8. At any
# other cp they are not, and the corpus has another identity.
ROOM_MULTIPLE = 16
# Tokens whose pairs are counted at once.
CHUNK = 2**22


_LOOKED_AT = 16  # documents of a data set that show what answers end with
# What the loss of the held-out piece is called; that of a data set of its own has its name behind this one.
HELD_OUT = "validation"


@dataclass(frozen=True)
class LeftOut:
    """Rows of a data set that did not become tokens as they are: how many, and a line for each reason."""

    skipped: int  # corrupt rows and files that were passed over
    deleted: int  # rows that were too long (`data.truncation`), and so those that are cut
    cut: int
    skipped_rows: tuple[str, ...]
    long_rows: tuple[str, ...]  # with what became of them

    @classmethod
    def of(cls, stores: Sequence[Store]) -> "LeftOut":
        """What was left out of some stores."""

        def count(fact: str) -> int:
            return sum(store.facts[fact] for store in stores)

        def first(fact: str) -> tuple[str, ...]:
            return tuple(place for store in stores for place in store.facts[fact])[:SHOWN]

        return cls(count("skipped_count"), count("deleted"), count("cut"), first("skipped"), first("long"))


@dataclass(frozen=True)
class Corpus:
    """Samples to train on, in which order, samples to evaluate with, and where they come from."""

    training: Samples
    order: Blend  # of the samples to train on
    validation: Mapping[str, Samples]  # by what their losses are called
    documents: int  # of all data sets, those to evaluate with too
    identity: Mapping[str, str]  # of the tokens and how they were made: what a resume must find again
    stores: tuple[Store, ...]  # of what is trained on
    left_out: LeftOut  # of these
    validation_left_out: Mapping[str, LeftOut]  # of each of data.validation_sets
    formats: Mapping[str, int]  # rows of all data sets by how they were read, such as "openai (messages)"
    tokenizer: Tokenizer
    is_byte_text: bool  # whether it is running text, whose every token is a byte or the end of a text

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return sum(len(store.ids) for store in self.stores)

    @functools.cached_property
    def ends(self) -> frozenset[int]:
        """The special tokens that what is learned ends with, in the first documents: by them a model stops.

        White space may follow, which is a turn's as well.
        """
        found: set[int] = set()
        for store in self.stores:
            for start, length in zip(store.starts[:_LOOKED_AT], store.lengths[:_LOOKED_AT], strict=True):
                places = np.arange(start, start + length)
                found |= learned_ends(store.ids[places], learned_at(store, places), self.tokenizer)
        return frozenset(found)

    @functools.cached_property
    def bigram_entropy(self) -> float | None:
        """Nats per byte that the text's own pair counts leave; None where tokens are not bytes of text."""
        return _bigram_entropy([store.ids for store in self.stores]) if self.is_byte_text else None


def learned_ends(ids: Tokens, learned: Learned, tokenizer: Tokenizer) -> set[int]:
    """The special tokens of a document [t] that runs of learned ones [t] end with, white space aside."""
    found = set()
    for last in np.flatnonzero(learned & ~np.append(learned[1:], False)):
        blank = last and learned[last - 1] and not tokenizer.decode([int(ids[last])]).strip()
        found.add(int(ids[last - 1] if blank else ids[last]))
    return found & tokenizer.special


@dataclass(frozen=True)
class _DataSet:
    """What some paths of a recipe come to: samples to learn from, and those held out of them, if any."""

    stores: list[Store]
    files: int
    training: Samples
    held_out: list[Samples]
    is_made: bool  # whether its tokens were made by megatron's tools


class _Further:
    """Several stores, one after the other: their progress, and how many documents came before."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self.before, self.documents = progress, 0, 0

    def __call__(self, tokens: int) -> None:
        self._progress(self.before + tokens)


def prepare(recipe: Recipe, directory: Path, progress: Progress = lambda tokens: None) -> Corpus:
    """The corpus of a recipe; its tokens are written under `directory` once and found there afterwards.

    `progress` is told now and then how many tokens there are so far. Any number of processes may do
    this at once on one file system. Raises UsageError for paths and tokenizers
    that are not there, for corrupt data (`data.on_error: stop`) and for too little of it.
    """
    data, further = recipe.data, _Further(progress)
    made = tokenizer(data.tokenizer, recipe.architecture.vocab_size)
    parts = [_data_set(recipe, directory, paths, made, "to train on", further) for paths in data.data_sets]
    held = [samples for part in parts for samples in part.held_out]
    named = {
        name: _data_set(
            recipe.validating(name), directory, own.path, made, f"in data.validation_sets.{name}", further
        )
        for name, own in data.validation_sets.items()
    }
    stores = tuple(store for part in parts for store in part.stores)
    return Corpus(
        training=joined([part.training for part in parts]),
        order=Blend([len(part.training) for part in parts], data.weights or (1.0,), recipe.seed),
        validation=({HELD_OUT: joined(held)} if held else {})
        | {f"{HELD_OUT}/{name}": own.training for name, own in named.items()},
        documents=further.documents,
        identity=_identity(recipe, sum(part.files for part in parts), made, stores)
        | {f"validation set {name}": _tokens(own.stores) for name, own in named.items()},
        stores=stores,
        left_out=LeftOut.of(stores),
        validation_left_out={name: LeftOut.of(own.stores) for name, own in named.items()},
        formats=_count_formats([*stores, *(store for own in named.values() for store in own.stores)]),
        tokenizer=made,
        is_byte_text=recipe.task == "pretrain"
        and made.identity == "bytes"
        and not any(part.is_made for part in parts),
    )


def _data_set(
    recipe: Recipe,
    directory: Path,
    paths: Sequence[str],
    made: Tokenizer,
    purpose: str,
    further: _Further,
) -> _DataSet:
    """The samples of some paths. What megatron's tools wrote is a store a file, what we write is one."""
    sources = expand(paths, recipe.data.source)
    is_made = sources[0].kind == MEGATRON
    together = [[source] for source in sources] if is_made else [sources]
    stores, training, held_out = [], [], []
    for each in together:
        store = stored(recipe, directory, each, made, _longest(recipe), further)
        first = further.documents
        further.before += len(store.ids)
        further.documents += len(store.lengths)
        stores.append(store)
        learned_from, held = _parts(recipe, store)
        training.append(_samples(recipe, store, learned_from, made, purpose, first))
        if len(held):
            held_out.append(_samples(recipe, store, held, made, "held out", first))
    return _DataSet(stores, len(sources), joined(training), held_out, is_made)


def changed(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs between the data of a checkpoint and the data found now; empty when they are the same."""
    keys = dict.fromkeys([*saved, *now])
    return [f"data {k}: was {saved.get(k)}, is {now.get(k)}" for k in keys if saved.get(k) != now.get(k)]


def _identity(recipe: Recipe, files: int, made: Tokenizer, stores: Sequence[Store]) -> dict[str, str]:
    identity = {"files": str(files), "tokenizer": made.identity}
    identity |= {"stdlib": interpreter()} if STDLIB in recipe.data.path else {}
    identity |= {"tokens": _tokens(stores), "order": ORDER}
    if recipe.data.packed:  # more than the recipe's data section decides how sequences are put into packs
        room, multiple = _room(recipe)
        most = "" if (longest := _longest(recipe)) == room else f", of at most {longest}"
        identity["packs (parallel.cp decides)"] = (
            f"{room} tokens, each sequence a multiple of {multiple}{most}"
        )
    return identity


def _count_formats(stores: Sequence[Store]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for store in stores:
        counts.update(store.facts["formats"])
    return dict(counts.most_common())


def _tokens(stores: Sequence[Store]) -> str:
    """A digest of the tokens of some stores."""
    digests = [store.facts["sha256"] for store in stores]
    return digests[0] if len(digests) == 1 else json_digest(digests)


def _room(recipe: Recipe) -> tuple[int, int]:
    """Tokens of a sample for each of its documents, and the multiple in which a pack gives room to each."""
    length = recipe.data.sequence_length
    if not recipe.data.packed:
        return length, 1
    length //= recipe.documents_per_sample  # a pack holds all of a sample
    multiple = recipe.alignment.sequence
    even = math.lcm(multiple, ROOM_MULTIPLE)
    return (length // even * even, even) if length >= even else (length // multiple * multiple, multiple)


def _longest(recipe: Recipe) -> int:
    """Tokens that one sequence may have: positions begin anew in each, however long its pack is."""
    return min(_room(recipe)[0], recipe.architecture.max_position_embeddings)


def _parts(recipe: Recipe, store: Store) -> tuple[Spans, Spans]:
    """The pieces to train on and those held out, both in the order of the documents.

    What one row made is on one side.
    """
    spans, rows = Spans(store.starts, store.lengths), store.rows
    if recipe.task == "pretrain":
        spans = spans.cut(
            _longest(recipe) if recipe.data.packed else SEQUENCES_PER_PIECE * recipe.data.sequence_length
        )
        rows = np.arange(len(spans))
    if recipe.data.packed or recipe.task != "pretrain":
        labelled = spans.lengths > 1  # a single token has no label; no document of a pair is one
        spans, rows = spans.where(labelled), rows[labelled]
    numbers, rows = np.unique(rows, return_inverse=True)
    chosen = held_out(len(numbers), recipe.data.validation, recipe.seed)[rows]
    return spans.where(~chosen), spans.where(chosen)


def _samples(
    recipe: Recipe, store: Store, spans: Spans, made: Tokenizer, purpose: str, first: int
) -> Samples:
    """The samples of these pieces; `first` is the number of the store's first document among all."""
    length, together = recipe.data.sequence_length, recipe.documents_per_sample
    samples: Samples
    if recipe.data.packed:
        room, multiple = _room(recipe)
        sizes = (-(-spans.lengths // multiple) * multiple).reshape(-1, together).sum(1)
        packs = [members(pack, together) for pack in best_fit(sizes, room * together)]
        samples = Packs(store, spans, packs, first=first, images=Processing.of(recipe))
    elif recipe.task != "pretrain":
        samples = Rows(
            store,
            spans,
            length,
            made.end_of_text,
            together=together,
            first=first,
            images=Processing.of(recipe),
        )
    else:
        samples = Windows(store, spans, length)
    if len(samples) == 0:
        have = f"the data has {len(store.lengths)} documents with {len(store.ids)} tokens"
        skipped, deleted = store.facts["skipped_count"], store.facts["deleted"]
        raise UsageError(
            f"{have}: not one sample of {length} tokens is {purpose}; give more data, a smaller "
            f"data.sequence_length, or another data.validation than {recipe.data.validation:g}"
            + (f"; {skipped} corrupt rows or files were skipped" if skipped else "")
            + (f"; {deleted} rows that are too long were deleted" if deleted else ""),
            store.facts["skipped"] + store.facts["long"],
        )
    return samples


def _bigram_entropy(texts: Sequence[NDArray[Any]]) -> float:
    """H(next | previous) of the texts' own pair counts, in nats per byte; a text's end counts as one."""
    pairs = np.zeros((BYTE_VOCABULARY, BYTE_VOCABULARY), np.int64)
    for ids in texts:
        for start in range(0, max(0, len(ids) - 1), CHUNK):
            part = ids[start : start + CHUNK + 1].astype(np.int64)
            found = np.bincount(part[:-1] * BYTE_VOCABULARY + part[1:], minlength=pairs.size)
            pairs += found.reshape(pairs.shape)
    return _entropy(pairs) - _entropy(pairs.sum(1))


def _entropy(counts: NDArray[np.int64]) -> float:
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(-(shares * np.log(shares)).sum())


LEARNED = ("⟦", "⟧")
_ENOUGH = 400  # tokens of a sample that are shown


@dataclass(frozen=True)
class Share:
    """One data set of a blend, over all steps of the recipe."""

    path: str
    weight: float
    samples: int  # that are trained on
    epochs: float  # that these are of its own samples


@dataclass(frozen=True)
class Inspection:
    """Counts of a corpus under a recipe."""

    rows: int  # that the documents were made of
    documents: int
    formats: Mapping[str, int]  # rows by how they were read
    left_out: LeftOut
    tokens: int
    images: int
    videos: int
    learned: int  # tokens that have a loss in some sample or would, were all of them trained on
    training: int  # samples
    held_out: int
    validation_sets: Mapping[str, int]  # samples of each
    validation_left_out: Mapping[str, LeftOut]  # of each
    filled: float  # share of the room of a sample that tokens take; packs and rows only
    steps: int
    steps_per_epoch: float
    epochs: float  # that the recipe's steps make
    blend: tuple[Share, ...]


def inspect(recipe: Recipe, corpus: Corpus) -> Inspection:
    """The counts; nothing is read but what lies in the token store. Raises what `with_steps` raises."""
    train, count = with_steps(recipe, len(corpus.training)).train, len(corpus.training)
    rows = recipe.rows // train.micro_batch_size
    others = {name: len(samples) for name, samples in corpus.validation.items()}
    held_out = others.pop(HELD_OUT, 0)
    seen = [store.pictures for store in corpus.stores if store.pictures is not None]
    return Inspection(
        rows=sum(len(store.lengths) - int((store.together[:, 1] - 1).sum()) for store in corpus.stores),
        documents=sum(len(store.lengths) for store in corpus.stores),
        formats=corpus.formats,
        left_out=corpus.left_out,
        tokens=corpus.tokens,
        images=sum(len(of.grids) - len(of.videos) for of in seen),
        videos=sum(len(of.videos) for of in seen),
        learned=sum(map(_learned, corpus.stores)),
        training=count,
        held_out=held_out,
        validation_sets={name.removeprefix(f"{HELD_OUT}/"): size for name, size in others.items()},
        validation_left_out=corpus.validation_left_out,
        filled=min(1.0, corpus.tokens / ((count + held_out) * rows * recipe.data.sequence_length)),
        steps=train.steps,
        steps_per_epoch=count / train.global_batch_size,
        epochs=train.steps * train.global_batch_size / count,
        blend=tuple(_blend(recipe, corpus, train.steps * train.global_batch_size)),
    )


def _blend(recipe: Recipe, corpus: Corpus, samples: int) -> Iterator[Share]:
    if recipe.data.weights is None:
        return
    whole, taken = sum(recipe.data.weights), corpus.order.taken(samples).tolist()
    each = zip(recipe.data.path, recipe.data.weights, taken, corpus.order.sizes, strict=True)
    for path, weight, count, size in each:
        yield Share(path, weight / whole, count, count / size)


def _learned(store: Store) -> int:
    return len(store.ids) if store.learned is None else int(np.count_nonzero(store.learned))


def first_samples(recipe: Recipe, corpus: Corpus, count: int) -> list[str]:
    """The first samples of step 1 as text, at most as many as a step has."""
    numbers = corpus.order.drawn(0, min(count, recipe.train.global_batch_size))
    # megatron's files do not say which tokenizer they were made with: bytes would show them as garbage.
    unknown = recipe.data.source == MEGATRON and corpus.tokenizer.identity == Bytes.identity
    shown_by = Numbers() if unknown else corpus.tokenizer
    return [marked(corpus.training.batch(number), shown_by) for number in numbers[:, None]]


def marked(batch: Batch, tokenizer: Tokenizer) -> str:
    """A sample [b, s] as text: what is learned between `LEARNED`, a blank line between its sequences."""
    return "\n\n".join(_marked(batch, row, tokenizer) for row in range(len(batch.ids)))


def _marked(batch: Batch, row: int, tokenizer: Tokenizer) -> str:
    ids = batch.ids[row].tolist()
    learned = [False, *(batch.loss_mask[row, :-1] > 0).tolist()]
    ids.append(int(batch.labels[row, -1]))
    learned.append(bool(batch.loss_mask[row, -1] > 0))
    ends = np.cumsum(batch.lengths).tolist() if batch.lengths else [len(ids)]
    texts, begin = [], 0
    for end in ends:
        texts.append(_text(ids[begin:end], learned[begin:end], tokenizer))
        begin = end
        if begin >= _ENOUGH and end != ends[-1]:
            texts.append(f"... {len(ends) - len(texts)} sequences more")
            break
    return "\n\n".join(texts)


def _text(ids: list[int], learned: list[bool], tokenizer: Tokenizer) -> str:
    while len(ids) > 1 and not learned[len(ids) - 1] and ids[-1] == ids[-2] == tokenizer.end_of_text:
        ids = ids[:-1]  # padding
    shown = ""
    for is_learned, run in groupby(range(min(len(ids), _ENOUGH)), key=lambda at: learned[at]):
        text = tokenizer.decode([ids[at] for at in run])
        shown += f"{LEARNED[0]}{text}{LEARNED[1]}" if is_learned else text
    return shown + (f" ... {len(ids) - _ENOUGH} tokens more" if len(ids) > _ENOUGH else "")
