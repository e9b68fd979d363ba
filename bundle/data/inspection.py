"""What a recipe's data comes to, and samples as a person reads them: learned tokens in brackets."""

from dataclasses import dataclass
from itertools import groupby

import numpy as np

from bundle.data.corpus import Corpus
from bundle.data.samplers import drawn
from bundle.data.samples import Batch
from bundle.data.store import Store
from bundle.data.tokenizers import Tokenizer
from bundle.recipe import Recipe

LEARNED = ("⟦", "⟧")
_ENOUGH = 400  # tokens of a sample that are shown


@dataclass(frozen=True)
class Inspection:
    """Counts of a corpus under a recipe."""

    documents: int
    skipped: int
    deleted: int  # rows that were too long, and so those that are cut
    cut: int
    tokens: int
    learned: int  # tokens that have a loss in some sample or would, were all of them trained on
    training: int  # samples
    held_out: int
    filled: float  # share of the room of a sample that tokens take; packs and rows only
    steps_per_epoch: float
    epochs: float  # that the recipe's steps make


def inspect(recipe: Recipe, corpus: Corpus) -> Inspection:
    """The counts; nothing is read but what lies in the token store."""
    train = recipe.train
    whole = len(corpus.training) + (len(corpus.validation) if corpus.validation is not None else 0)
    room = whole * recipe.data.sequence_length
    return Inspection(
        documents=sum(len(store.lengths) for store in corpus.stores),
        skipped=corpus.skipped_count,
        deleted=corpus.deleted,
        cut=corpus.cut,
        tokens=corpus.tokens,
        learned=sum(map(_learned, corpus.stores)),
        training=len(corpus.training),
        held_out=len(corpus.validation) if corpus.validation is not None else 0,
        filled=min(1.0, corpus.tokens / room),
        steps_per_epoch=len(corpus.training) / train.global_batch_size,
        epochs=train.steps * train.global_batch_size / len(corpus.training),
    )


def _learned(store: Store) -> int:
    return len(store.ids) if store.learned is None else int(np.count_nonzero(store.learned))


def first_samples(recipe: Recipe, corpus: Corpus, count: int) -> list[str]:
    """The first samples of step 1 as text, at most as many as a step has."""
    numbers = drawn(0, recipe.train.global_batch_size, len(corpus.training), recipe.seed)[:count]
    return [
        marked(corpus.training.batch(numbers[at : at + 1]), corpus.tokenizer) for at in range(len(numbers))
    ]


def marked(batch: Batch, tokenizer: Tokenizer) -> str:
    """A sample [1, s] as text: what is learned between `LEARNED`, a blank line between packed sequences."""
    ids = batch.ids[0].tolist()
    learned = [False, *(batch.loss_mask[0, :-1] > 0).tolist()]
    ids.append(int(batch.labels[0, -1]))
    learned.append(bool(batch.loss_mask[0, -1] > 0))
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
