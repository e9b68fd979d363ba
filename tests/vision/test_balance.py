"""Samples with many images and with none: micro-batches and ranks that have about as many patches."""

import json

import numpy as np
import pytest

from bundle.data import prepare
from bundle.data.loader import Loader
from bundle.data.samples import BLANK_SAMPLE_NUMBER, list_balanced_group_members
from bundle.recipe import load
from bundle.training.loop import get_sequence_lengths
from tests.vision import rows
from tests.vision.rows import asking, content, image

ROWS, BATCH, SIZE = 96, 32, 2


@pytest.fixture(scope="module")
def skewed(tmp_path_factory):
    """Rows of which a fourth has four images, a fourth a video, and half nothing, of as many tokens."""
    pytest.importorskip("transformers")
    names = [f"images/{number}.png" for number in range(4)]
    kinds = [
        lambda number: asking("<image>" * 4, str(number), images=names),
        lambda number: asking("<video>" + "?" * 24, str(number), videos=[names[:2]]),
        lambda number: asking("?" * 32, str(number)),
        lambda number: asking("!" * 32, str(number)),
    ]
    given = [kinds[number % 4](number) for number in range(ROWS)]
    files = {name: content(image(16, 16, seed)) for seed, name in enumerate(names)}
    return rows.write(tmp_path_factory.mktemp("skewed") / "data", given, files)


def steps(directory, how, dp):
    """Of each step and rank the micro-batches: the documents of each, and its patches."""
    longest = "model.config.max_position_embeddings=96"
    sizes = [f"train.global_batch_size={BATCH}", f"train.micro_batch_size={SIZE if how == 'rows' else 1}"]
    length = ["data.sequence_length=96", f"data.packed={json.dumps(how == 'packs')}"]
    job = load(str(rows.RECIPE), rows.overrides(directory, longest, *sizes, *length))
    corpus = prepare(job, directory / "cache")
    for consumed in range(0, 4 * BATCH, BATCH):
        loaders = [Loader(job, corpus, rank, dp) for rank in range(dp)]
        shares = [loader.read_training_step(consumed) for loader in loaders]
        batches = [batch for share in shares for batch in share]
        for step in (loader.compute_sizes(consumed) for loader in loaders):
            lengths = [length for batch in batches for length in get_sequence_lengths(batch)]
            assert sorted(step.lengths.tolist()) == sorted(lengths)
            grids = np.concatenate([batch.grids for batch in batches]).tolist()
            assert sorted(step.grids.tolist()) == sorted(grids)
        yield [
            [(frozenset(batch.documents.tolist()), int(batch.grids.prod(1).sum())) for batch in share]
            for share in shares
        ]


def spread(of_ranks):
    """By how many patches one rank has more than another."""
    each = [sum(patches for _, patches in share) for share in of_ranks]
    return max(each) - min(each)


@pytest.mark.parametrize("how", ["rows", "packs"])
@pytest.mark.parametrize("dp", [2, 4, 8])
def test_ranks_have_as_many_patches_but_for_those_of_one_sample(skewed, how, dp):
    for step, (alone,) in zip(steps(skewed, how, dp), steps(skewed, how, 1), strict=True):
        largest = max(patches for _, patches in alone)
        assert largest > 0 and spread(step) <= largest
        if how == "rows":  # of two samples each: no micro-batch has those of two with four images
            assert largest == 4 * 16
        # The same micro-batches for any number of ranks.
        assert sorted(map(str, (of for share in step for of in share))) == sorted(map(str, alone))
        assert how == "packs" or sum(len(documents) for documents, _ in alone) == BATCH


def test_samples_of_a_blend_have_the_patches_of_their_data_sets(skewed):
    given = [asking("?" * 32, str(number)) for number in range(ROWS - 7)]
    other = rows.write(skewed.parent / "of text", given, {})
    paths = ", ".join(str(directory / "rows.jsonl") for directory in (other, skewed))
    longest = ("model.config.max_position_embeddings=96", "data.sequence_length=96")
    sizes = (*longest, f"train.global_batch_size={BATCH}", f"train.micro_batch_size={SIZE}")
    blend = (f"data.path=[{paths}]", "data.weights=[0.5, 0.5]", *sizes)
    job = load(str(rows.RECIPE), rows.overrides(skewed, *blend))
    corpus = prepare(job, skewed / "cache")
    numbers = np.append(corpus.order.draw_samples(0, BATCH), BLANK_SAMPLE_NUMBER)
    each = [int(corpus.training.build_batch(number).grids.prod(1).sum()) for number in numbers[:, None]]
    assert corpus.training.count_patches(numbers).tolist() == each and len(set(each)) == 3


def test_rows_as_they_are_drawn_are_not_balanced(skewed, monkeypatch):
    def drawn(self, whole, _):
        return whole.reshape(-1, self._dp, SIZE)[:, self._rank]

    monkeypatch.setattr(Loader, "_select_share", drawn)
    found = list(steps(skewed, "rows", 8))
    assert max(map(spread, found)) > 2 * 64
    assert max(patches for step in found for share in step for _, patches in share) == 2 * 64


def test_samples_that_are_all_alike_stay_in_the_order_in_which_they_are_drawn(skewed):
    given = [asking("<image>", str(number), images=["images/0.png"]) for number in range(8)]
    directory = rows.write(skewed.parent / "alike", given, {"images/0.png": content(image(16, 16))})
    job = load(
        str(rows.RECIPE), rows.overrides(directory, "train.global_batch_size=4", "train.micro_batch_size=2")
    )
    corpus = prepare(job, directory / "cache")
    drawn = corpus.order.draw_samples(0, 4)
    found = [batch.documents.tolist() for batch in Loader(job, corpus, 0, 1).read_training_step(0)]
    assert found == drawn.reshape(2, 2).tolist()


def test_all_are_dealt_in_equal_parts():
    costs = np.asarray([1, 50, 2, 40, 3, 30, 4, 20])
    found = list_balanced_group_members(costs, 4)
    assert found.shape == (4, 2) and sorted(found.ravel().tolist()) == list(range(8))
    assert costs[found].tolist() == [[50, 1], [40, 2], [30, 3], [20, 4]]
    assert list_balanced_group_members(np.asarray([9, 8, 1, 1, 1, 0]), 2).tolist() == [
        [0, 3, 5],
        [1, 2, 4],
    ]
    assert list_balanced_group_members(np.asarray([5, 9, 7]), 1).tolist() == [[1, 2, 0]]
