"""Make the data section of a recipe into numbered samples for training and evaluation, and count them."""

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

from bundle.data.cache import ensure_store
from bundle.data.processing import MediaProcessor
from bundle.data.samples import (
    ORDER_GENERATOR,
    Blend,
    RowSamples,
    SampleBatch,
    Samples,
    Spans,
    VariableLengthPackSamples,
    WindowSamples,
    choose_held_out,
    join_samples,
    list_sample_sequences,
    pack_best_fit,
    read_loss_mask,
)
from bundle.data.sources import MAX_REASONS
from bundle.data.store import Progress, Store
from bundle.data.tokenizers import (
    ByteTokenizer,
    IdDisplayTokenizer,
    LossMask,
    Tokenizer,
    Tokens,
    load_tokenizer,
)
from bundle.errors import UsageError, format_count
from bundle.files import compute_short_json_digest
from bundle.recipe import Recipe, with_epochs_as_steps
from bundle.recipe.data import BYTE_VOCABULARY
from bundle.recipe.datafiles import MEGATRON, STDLIB_CORPUS_KEYWORD, expand, format_python_version

# Running text is held out in pieces of this many sequences: small enough for an even sample.
VALIDATION_SPLIT_PIECE_SEQUENCES = 16
# Packed sequences are given room in these multiples, so that packs are the same at cp 1, 2, 4 and 8. At any
# other cp they are not, and the corpus has another identity.
PACKED_SEQUENCE_MULTIPLE = 16
# Tokens whose pairs are counted at once.
BIGRAM_CHUNK_TOKENS = 2**22


_END_TOKEN_DOCUMENTS = 16  # documents of a data set that show what answers end with
# The name of the held-out piece's loss; a validation set's loss has the set's name behind this one.
VALIDATION_LOSS_NAME = "validation"


@dataclass(frozen=True)
class LeftOut:
    """Rows of a data set that did not become tokens as they are: how many, and a line for each reason."""

    skipped: int  # corrupt rows and files that were passed over
    deleted: int  # rows that were too long (`data.truncation`), and so those that are cut
    cut: int
    skipped_rows: tuple[str, ...]
    long_rows: tuple[str, ...]  # with what became of them

    @classmethod
    def from_stores(cls, stores: Sequence[Store]) -> "LeftOut":
        """Return the rows that some stores left out."""

        def count(fact: str) -> int:
            return sum(store.facts[fact] for store in stores)

        def list_first(fact: str) -> tuple[str, ...]:
            return tuple(place for store in stores for place in store.facts[fact])[:MAX_REASONS]

        return cls(
            count("skipped_count"), count("deleted"), count("cut"), list_first("skipped"), list_first("long")
        )


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
        """The number of tokens of all documents."""
        return sum(len(store.ids) for store in self.stores)

    @functools.cached_property
    def end_tokens(self) -> frozenset[int]:
        """The special tokens at the ends of learned text in the first documents, by which a model stops.

        White space may follow such a token: it belongs to the turn too.
        """
        end_ids: set[int] = set()
        for store in self.stores:
            for start, length in zip(
                store.document_starts[:_END_TOKEN_DOCUMENTS],
                store.lengths[:_END_TOKEN_DOCUMENTS],
                strict=True,
            ):
                places = np.arange(start, start + length)
                end_ids |= find_end_tokens(store.ids[places], read_loss_mask(store, places), self.tokenizer)
        return frozenset(end_ids)

    @functools.cached_property
    def conditional_byte_entropy_nats(self) -> float | None:
        """The entropy of a byte given the one before it [nats]; None where tokens are not bytes of text."""
        return (
            _compute_conditional_entropy_nats([store.ids for store in self.stores])
            if self.is_byte_text
            else None
        )


def find_end_tokens(ids: Tokens, loss_mask: LossMask, tokenizer: Tokenizer) -> set[int]:
    """Return the special tokens at the ends of the learned runs of a document [t], white space aside."""
    end_ids = set()
    for last in np.flatnonzero(loss_mask & ~np.append(loss_mask[1:], False)):
        blank = last and loss_mask[last - 1] and not tokenizer.decode([int(ids[last])]).strip()
        end_ids.add(int(ids[last - 1] if blank else ids[last]))
    return end_ids & tokenizer.special_ids


@dataclass(frozen=True)
class _DataSet:
    """The samples of some paths of a recipe: those to learn from, and those held out of them, if any."""

    stores: list[Store]
    files: int
    training: Samples
    held_out: list[Samples]
    is_megatron: bool  # whether its tokens were made by megatron's tools


class _TotalProgress:
    """Several stores, one after the other: their progress, and how many documents came before."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self.tokens_before, self.documents = progress, 0, 0

    def __call__(self, tokens: int) -> None:
        self._progress(self.tokens_before + tokens)


def prepare(recipe: Recipe, directory: Path, progress: Progress = lambda tokens: None) -> Corpus:
    """Return the corpus of a recipe; its tokens are written under `directory` once and reused afterwards.

    `progress` is called now and then with the number of tokens so far. Any number of processes may call this
    at once on one file system. Raise UsageError for missing paths and tokenizers, for corrupt data
    (`data.on_error: stop`) and for too little data.
    """
    data, total_progress = recipe.data, _TotalProgress(progress)
    text_tokenizer = load_tokenizer(data.tokenizer, recipe.architecture.vocab_size)
    parts = [
        _build_data_set(recipe, directory, paths, text_tokenizer, "to train on", total_progress)
        for paths in data.training_set_paths
    ]
    held_out_samples = [samples for part in parts for samples in part.held_out]
    validation_sets = {
        name: _build_data_set(
            recipe.with_validation_set_as_data(name),
            directory,
            data_set.path,
            text_tokenizer,
            f"in data.validation_sets.{name}",
            total_progress,
        )
        for name, data_set in data.validation_sets.items()
    }
    stores = tuple(store for part in parts for store in part.stores)
    return Corpus(
        training=join_samples([part.training for part in parts]),
        order=Blend([len(part.training) for part in parts], data.weights or (1.0,), recipe.seed),
        validation=({VALIDATION_LOSS_NAME: join_samples(held_out_samples)} if held_out_samples else {})
        | {f"{VALIDATION_LOSS_NAME}/{name}": data_set.training for name, data_set in validation_sets.items()},
        documents=total_progress.documents,
        identity=_build_identity(recipe, sum(part.files for part in parts), text_tokenizer, stores)
        | {
            f"validation set {name}": _digest_tokens(data_set.stores)
            for name, data_set in validation_sets.items()
        },
        stores=stores,
        left_out=LeftOut.from_stores(stores),
        validation_left_out={
            name: LeftOut.from_stores(data_set.stores) for name, data_set in validation_sets.items()
        },
        formats=_count_rows_by_format(
            [*stores, *(store for data_set in validation_sets.values() for store in data_set.stores)]
        ),
        tokenizer=text_tokenizer,
        is_byte_text=recipe.task_traits.has_plain_text_rows
        and text_tokenizer.identity == "bytes"
        and not any(part.is_megatron for part in parts),
    )


def _build_data_set(
    recipe: Recipe,
    directory: Path,
    paths: Sequence[str],
    tokenizer: Tokenizer,
    purpose: str,
    total_progress: _TotalProgress,
) -> _DataSet:
    """Return the samples of some paths.

    Each file of megatron's tools is a store of its own; all other files are one store together.
    """
    sources = expand(paths, recipe.data.source)
    is_megatron = sources[0].kind == MEGATRON
    source_groups = [[source] for source in sources] if is_megatron else [sources]
    stores, training, held_out = [], [], []
    for group in source_groups:
        store = ensure_store(
            recipe, directory, group, tokenizer, _compute_max_document_length(recipe), total_progress
        )
        first_document = total_progress.documents
        total_progress.tokens_before += len(store.ids)
        total_progress.documents += len(store.lengths)
        stores.append(store)
        training_spans, held_spans = _split_held_out(recipe, store)
        training.append(_build_samples(recipe, store, training_spans, tokenizer, purpose, first_document))
        if len(held_spans):
            held_out.append(_build_samples(recipe, store, held_spans, tokenizer, "held out", first_document))
    return _DataSet(stores, len(sources), join_samples(training), held_out, is_megatron)


def _build_identity(
    recipe: Recipe, files: int, tokenizer: Tokenizer, stores: Sequence[Store]
) -> dict[str, str]:
    identity = {"files": str(files), "tokenizer": tokenizer.identity}
    identity |= {"stdlib": format_python_version()} if STDLIB_CORPUS_KEYWORD in recipe.data.path else {}
    identity |= {"tokens": _digest_tokens(stores), "order": ORDER_GENERATOR}
    if recipe.data.packed:  # more than the recipe's data section decides how sequences are put into packs
        capacity, multiple = _compute_document_capacity_and_multiple(recipe)
        most = (
            ""
            if (max_length := _compute_max_document_length(recipe)) == capacity
            else f", of at most {max_length}"
        )
        identity["packs (parallel.cp decides)"] = (
            f"{capacity} tokens, each sequence a multiple of {multiple}{most}"
        )
    return identity


def _count_rows_by_format(stores: Sequence[Store]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for store in stores:
        counts.update(store.facts["formats"])
    return dict(counts.most_common())


def _digest_tokens(stores: Sequence[Store]) -> str:
    """Return a digest of the tokens of some stores."""
    digests = [store.facts["sha256"] for store in stores]
    return digests[0] if len(digests) == 1 else compute_short_json_digest(digests)


def _compute_document_capacity_and_multiple(recipe: Recipe) -> tuple[int, int]:
    """Return the tokens that a sample has for each document, and the multiple that a pack pads each to."""
    length = recipe.data.sequence_length
    if not recipe.data.packed:
        return length, 1
    length //= recipe.documents_per_sample  # a pack holds all of a sample
    multiple = recipe.alignment.sequence_multiple
    even = math.lcm(multiple, PACKED_SEQUENCE_MULTIPLE)
    return (length // even * even, even) if length >= even else (length // multiple * multiple, multiple)


def _compute_max_document_length(recipe: Recipe) -> int:
    """Return the tokens that one sequence may have.

    Positions begin anew in each sequence, so the length of a pack does not count.
    """
    return min(
        _compute_document_capacity_and_multiple(recipe)[0], recipe.architecture.max_position_embeddings
    )


def _split_held_out(recipe: Recipe, store: Store) -> tuple[Spans, Spans]:
    """Return the pieces to train on and those held out, both in the order of the documents.

    All documents of one row are on the same side.
    """
    spans, rows = Spans(store.document_starts, store.lengths), store.document_row_numbers
    if recipe.task_traits.has_plain_text_rows:
        spans = spans.split_by_max_length(
            _compute_max_document_length(recipe)
            if recipe.data.packed
            else VALIDATION_SPLIT_PIECE_SEQUENCES * recipe.data.sequence_length
        )
        rows = np.arange(len(spans))
    if recipe.data.packed or not recipe.task_traits.has_plain_text_rows:
        labelled = spans.lengths > 1  # a single token has no label; no document of a pair is one
        spans, rows = spans.select(labelled), rows[labelled]
    numbers, rows = np.unique(rows, return_inverse=True)
    chosen = choose_held_out(len(numbers), recipe.data.validation, recipe.seed)[rows]
    return spans.select(~chosen), spans.select(chosen)


def _build_samples(
    recipe: Recipe, store: Store, spans: Spans, tokenizer: Tokenizer, purpose: str, first_document: int
) -> Samples:
    """Return the samples of these pieces.

    `first_document` is the number of the store's first document among all documents.
    """
    length, documents_per_sample = recipe.data.sequence_length, recipe.documents_per_sample
    samples: Samples
    if recipe.data.packed:
        capacity, multiple = _compute_document_capacity_and_multiple(recipe)
        sizes = (-(-spans.lengths // multiple) * multiple).reshape(-1, documents_per_sample).sum(1)
        packs = [
            list_sample_sequences(pack, documents_per_sample)
            for pack in pack_best_fit(sizes, capacity * documents_per_sample)
        ]
        samples = VariableLengthPackSamples(
            store, spans, packs, first_document=first_document, processor=MediaProcessor.from_recipe(recipe)
        )
    elif not recipe.task_traits.has_plain_text_rows:
        samples = RowSamples(
            store,
            spans,
            length,
            tokenizer.end_of_text,
            documents_per_sample=documents_per_sample,
            first_document=first_document,
            processor=MediaProcessor.from_recipe(recipe),
        )
    else:
        samples = WindowSamples(store, spans, length)
    if len(samples) == 0:
        documents = format_count(len(store.lengths), "document")
        tokens = format_count(len(store.ids), "token")
        skipped, deleted = store.facts["skipped_count"], store.facts["deleted"]
        share = recipe.data.validation
        too_long = f"{format_count(deleted, 'row')} {'was' if deleted == 1 else 'were'} deleted"
        raise UsageError(
            f"the data has {documents} with {tokens}, too few for one sample of {length} tokens {purpose}."
            + (f" Rows or files skipped as corrupt: {skipped}. Correct them." if skipped else "")
            + (f" {too_long} as too long. Raise data.sequence_length." if deleted else "")
            + ("" if skipped or deleted else " Give more data or a smaller data.sequence_length.")
            + (f" Or change data.validation, which is {share:g}." if share else ""),
            store.facts["skipped"] + store.facts["long"],
        )
    return samples


def _compute_conditional_entropy_nats(texts: Sequence[NDArray[Any]]) -> float:
    """Return H(next | previous) of the texts' own pair counts [nats per byte].

    The end of a text counts as a byte.
    """
    pairs = np.zeros((BYTE_VOCABULARY, BYTE_VOCABULARY), np.int64)
    for ids in texts:
        for start in range(0, max(0, len(ids) - 1), BIGRAM_CHUNK_TOKENS):
            part = ids[start : start + BIGRAM_CHUNK_TOKENS + 1].astype(np.int64)
            counts = np.bincount(part[:-1] * BYTE_VOCABULARY + part[1:], minlength=pairs.size)
            pairs += counts.reshape(pairs.shape)
    return _compute_entropy(pairs) - _compute_entropy(pairs.sum(1))


def _compute_entropy(counts: NDArray[np.int64]) -> float:
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(-(shares * np.log(shares)).sum())


LEARNED_TEXT_MARKERS = ("⟦", "⟧")
_SAMPLE_PREVIEW_TOKENS = 400  # tokens of a sample that are shown


@dataclass(frozen=True)
class BlendShare:
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
    blend: tuple[BlendShare, ...]


def inspect(recipe: Recipe, corpus: Corpus) -> Inspection:
    """Return the counts from the token store alone. Raise what `with_epochs_as_steps` raises."""
    train, count = with_epochs_as_steps(recipe, len(corpus.training)).train, len(corpus.training)
    rows = recipe.micro_batch_full_rows // train.micro_batch_size_or_one
    sample_counts = {name: len(samples) for name, samples in corpus.validation.items()}
    held_out = sample_counts.pop(VALIDATION_LOSS_NAME, 0)
    store_pictures = [store.pictures for store in corpus.stores if store.pictures is not None]
    return Inspection(
        rows=sum(len(store.lengths) - int((store.row_groups[:, 1] - 1).sum()) for store in corpus.stores),
        documents=sum(len(store.lengths) for store in corpus.stores),
        formats=corpus.formats,
        left_out=corpus.left_out,
        tokens=corpus.tokens,
        images=sum(len(pictures.grids) - len(pictures.videos) for pictures in store_pictures),
        videos=sum(len(pictures.videos) for pictures in store_pictures),
        learned=sum(map(_count_learned_tokens, corpus.stores)),
        training=count,
        held_out=held_out,
        validation_sets={
            name.removeprefix(f"{VALIDATION_LOSS_NAME}/"): size for name, size in sample_counts.items()
        },
        validation_left_out=corpus.validation_left_out,
        filled=min(1.0, corpus.tokens / ((count + held_out) * rows * recipe.data.sequence_length)),
        steps=train.steps,
        steps_per_epoch=count / train.global_batch_size,
        epochs=train.steps * train.global_batch_size / count,
        blend=tuple(_list_shares(recipe, corpus, train.steps * train.global_batch_size)),
    )


def _list_shares(recipe: Recipe, corpus: Corpus, samples: int) -> Iterator[BlendShare]:
    if recipe.data.weights is None:
        return
    total_weight, taken = sum(recipe.data.weights), corpus.order.count_samples(samples).tolist()
    data_sets = zip(recipe.data.path, recipe.data.weights, taken, corpus.order.sizes, strict=True)
    for path, weight, count, size in data_sets:
        yield BlendShare(path, weight / total_weight, count, count / size)


def _count_learned_tokens(store: Store) -> int:
    return len(store.ids) if store.loss_mask is None else int(np.count_nonzero(store.loss_mask))


def decode_first_samples(recipe: Recipe, corpus: Corpus, count: int) -> list[str]:
    """Return the first samples of step 1 as text, at most as many as a step has."""
    numbers = corpus.order.draw_samples(0, min(count, recipe.train.global_batch_size))
    # megatron's files do not say which tokenizer they were made with: bytes would show them as garbage.
    unknown = recipe.data.source == MEGATRON and corpus.tokenizer.identity == ByteTokenizer.identity
    decoder = IdDisplayTokenizer() if unknown else corpus.tokenizer
    return [
        decode_with_learned_brackets(corpus.training.build_batch(number), decoder)
        for number in numbers[:, None]
    ]


def decode_with_learned_brackets(batch: SampleBatch, tokenizer: Tokenizer) -> str:
    """Return a sample [b, s] as text.

    `LEARNED_TEXT_MARKERS` enclose learned text, and a blank line separates sequences.
    """
    return "\n\n".join(_decode_row(batch, row, tokenizer) for row in range(len(batch.ids)))


def _decode_row(batch: SampleBatch, row: int, tokenizer: Tokenizer) -> str:
    ids = batch.ids[row].tolist()
    learned = [False, *(batch.loss_mask[row, :-1] > 0).tolist()]
    ids.append(int(batch.labels[row, -1]))
    learned.append(bool(batch.loss_mask[row, -1] > 0))
    ends = np.cumsum(batch.lengths).tolist() if batch.lengths else [len(ids)]
    texts, begin = [], 0
    for end in ends:
        texts.append(_decode_text(ids[begin:end], learned[begin:end], tokenizer))
        begin = end
        if begin >= _SAMPLE_PREVIEW_TOKENS and end != ends[-1]:
            texts.append(f"... {len(ends) - len(texts)} sequences more")
            break
    return "\n\n".join(texts)


def _decode_text(ids: list[int], learned: list[bool], tokenizer: Tokenizer) -> str:
    while len(ids) > 1 and not learned[len(ids) - 1] and ids[-1] == ids[-2] == tokenizer.end_of_text:
        ids = ids[:-1]  # padding
    shown = ""
    for is_learned, run in groupby(range(min(len(ids), _SAMPLE_PREVIEW_TOKENS)), key=lambda at: learned[at]):
        text = tokenizer.decode([ids[at] for at in run])
        shown += f"{LEARNED_TEXT_MARKERS[0]}{text}{LEARNED_TEXT_MARKERS[1]}" if is_learned else text
    return shown + (
        f" ... {len(ids) - _SAMPLE_PREVIEW_TOKENS} tokens more" if len(ids) > _SAMPLE_PREVIEW_TOKENS else ""
    )
