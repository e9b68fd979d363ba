"""What a recipe's data comes to, and samples as a person reads them: learned tokens in brackets."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from bundle.data.corpus import HELD_OUT, Corpus, LeftOut
from bundle.data.samples import Batch
from bundle.data.store import Store
from bundle.data.tokenizers import Tokenizer
from bundle.recipe import Recipe, with_steps

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

    documents: int
    left_out: LeftOut
    tokens: int
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
    others = {name: len(samples) for name, samples in corpus.validation.items()}
    held_out = others.pop(HELD_OUT, 0)
    return Inspection(
        documents=sum(len(store.lengths) for store in corpus.stores),
        left_out=corpus.left_out,
        tokens=corpus.tokens,
        learned=sum(map(_learned, corpus.stores)),
        training=count,
        held_out=held_out,
        validation_sets={name.removeprefix(f"{HELD_OUT}/"): size for name, size in others.items()},
        validation_left_out=corpus.validation_left_out,
        filled=min(1.0, corpus.tokens / ((count + held_out) * recipe.data.sequence_length)),
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
    return [marked(corpus.training.batch(number), corpus.tokenizer) for number in numbers[:, None]]


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
