"""Several data sets in one run: megatron's rule, proportions, epochs, and the same at any number of ranks."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundle.checkpoints.state import list_data_changes
from bundle.data import Loader, prepare
from bundle.data.corpus import inspect
from bundle.data.samples import MAX_WEIGHT_DENOMINATOR, Blend
from bundle.errors import UsageError
from bundle.recipe import load
from tests.data.test_indexed import build

WEIGHTS = st.lists(
    st.sampled_from([0.001, 0.05, 0.1, 0.25, 0.3, 0.5, 1, 2, 7, 1 / 3]), min_size=1, max_size=5
)
NAMES = ("small", "middle", "large")
SIZES = (30, 90, 400)


def owners(blend: Blend, first: int, count: int) -> np.ndarray:
    ends = np.cumsum(blend.sizes)
    return np.searchsorted(ends, blend.draw_samples(first, count), side="right")


@given(WEIGHTS, st.integers(1, 3000))
def test_next_comes_the_data_set_whose_share_lags_most(weights, places):
    blend = Blend([5] * len(weights), weights, 1)
    shares, taken = np.asarray(weights, float) / sum(weights), np.zeros(len(weights))
    rounded = len(weights) / MAX_WEIGHT_DENOMINATOR
    for place, owner in enumerate(owners(blend, 0, places)):
        lag = shares * max(place, 1) - taken
        assert lag[owner] >= lag.max() - place * rounded - 1e-9
        taken[owner] += 1
        assert (np.abs(taken - shares * (place + 1)) < len(weights) + place * rounded).all()
    assert taken.tolist() == blend.count_samples(places).tolist()


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.25, 0.5, 0.25), (3, 7), (1, 2, 3), (0.123, 0.456, 0.421)])
def test_megatron_draws_the_same(weights):
    """Where shares lag alike, its floats decide by their rounding; of these they never do."""
    helpers = pytest.importorskip("megatron.core.datasets.helpers_cpp")
    count, blend = 5000, Blend([10] * len(weights), weights, 1)
    sets, samples = np.zeros(count, np.int16), np.zeros(count, np.int64)
    given = np.asarray(weights, np.float64) / sum(weights)
    helpers.build_blending_indices(sets, samples, given, len(weights), count, False)
    assert owners(blend, 0, count).tolist() == sets.tolist()
    assert blend.count_samples(count).tolist() == np.bincount(sets, minlength=len(weights)).tolist()


@given(WEIGHTS, st.integers(0, 400_000), st.integers(1, 40))
def test_any_place_is_found_without_those_before_it(weights, first, count):
    blend = Blend(range(2, 2 + len(weights)), weights, 3)
    far = first + 2 * blend.period
    later = owners(blend, far, count)
    assert later.tolist() == owners(blend, far + 7 * blend.period, count).tolist()
    assert (
        blend.count_samples(far + count) - blend.count_samples(far)
        == np.bincount(later, minlength=len(weights))
    ).all()
    one_by_one = [blend.draw_samples(first + at, 1)[0] for at in range(count)]
    assert blend.draw_samples(first, count).tolist() == one_by_one


def test_each_epoch_of_each_data_set_has_every_sample_once_in_an_order_of_its_own():
    blend = Blend((4, 4, 50), (0.25, 0.25, 0.5), 5)
    numbers = blend.draw_samples(0, 160)
    assert blend.count_samples(160).tolist() == [40, 40, 80]
    small = [numbers[(numbers >= 4 * part) & (numbers < 4 * part + 4)] - 4 * part for part in (0, 1)]
    assert all(sorted(epoch) == [0, 1, 2, 3] for part in small for epoch in part.reshape(10, 4).tolist())
    assert small[0].tolist() != small[1].tolist()
    large = numbers[numbers >= 8]
    assert sorted(large[:50].tolist()) == list(range(8, 58)) and len(set(large[50:].tolist())) == 30


def test_a_run_of_one_data_set_is_what_it_was():
    assert Blend((100,), (3.0,), 7).draw_samples(95, 10).tolist() == [47, 59, 22, 83, 69, 31, 17, 25, 24, 80]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Three data sets whose ids tell them apart."""
    folder = tmp_path_factory.mktemp("built")
    random = np.random.default_rng(0)
    for number, (name, size) in enumerate(zip(NAMES, SIZES, strict=True)):
        build(
            folder / name,
            [[random.integers(80 * number, 80 * number + 80, 17).tolist()] for _ in range(size)],
        )
    return folder


def recipe(built, *overrides):
    paths = ",".join(str(built / name) for name in NAMES)
    where = [f"data.path=[{paths}]", "data.source=megatron", "data.separator=null", "data.sequence_length=16"]
    batches = ["train.micro_batch_size=1", "train.global_batch_size=16"]
    return load("demo", [*where, *batches, "data.weights=[0.5, 0.3, 0.2]", "data.validation=0", *overrides])


def set_of(batch):
    (number,) = set((batch.ids // 80).flatten().tolist())
    return number


@pytest.mark.parametrize("packed", ["true", "false"])
def test_a_step_is_the_same_at_any_number_of_ranks_and_has_the_proportions(built, tmp_path, packed):
    made = recipe(built, f"data.packed={packed}")
    corpus = prepare(made, tmp_path)

    def step(consumed, dp):
        ranks = [
            Loader(made, prepare(made, tmp_path), rank, dp).read_training_step(consumed) for rank in range(dp)
        ]
        return sorted(tuple(b.ids.flatten().tolist()) for batches in ranks for b in batches)

    for consumed in (0, 16, 16 * 100):
        one = step(consumed, 1)
        assert one == step(consumed, 2) == step(consumed, 4)
        for rank in range(2):  # every rank knows the sizes of all
            sizes = Loader(made, corpus, rank, 2).compute_sizes(consumed)
            assert sorted(sizes.lengths.tolist()) == sorted(map(len, one)) and not sizes.grids.size
    if packed == "true":  # a window may begin in one data set's document and never in another data set
        return
    loader = Loader(made, corpus, 0, 1)
    sets = [set_of(batch) for consumed in range(0, 1600, 16) for batch in loader.read_training_step(consumed)]
    assert np.bincount(sets).tolist() == [800, 480, 320]


def test_weights_are_of_paths_of_any_kind(tmp_path):
    for letter, count in (("a", 3), ("b", 60)):
        (tmp_path / letter).mkdir()
        for number in range(count):
            (tmp_path / letter / f"{number}.txt").write_text(letter * 40)
    paths = ",".join(str(tmp_path / letter) for letter in "ab")
    keys = ["data.source=text", f"data.path=[{paths}]", "data.weights=[1, 1]", "data.sequence_length=8"]
    made = load("demo", [*keys, "data.separator=null", "data.validation=0"])
    loader = Loader(made, prepare(made, tmp_path / "data"), 0, 1)
    ids = np.concatenate(
        [batch.ids.flatten() for step in range(20) for batch in loader.read_training_step(16 * step)]
    )
    counts = np.bincount(ids, minlength=257)
    assert counts[ord("a")] / counts[ord("b")] == pytest.approx(1, abs=0.05)


def test_what_check_says_of_a_blend(built, tmp_path):
    made = recipe(
        built, "train.steps=null", "train.epochs=2", "data.validation=0.1", "optimizer.warmup_steps=0"
    )
    corpus = prepare(made, tmp_path)
    found, sizes = inspect(made, corpus), corpus.order.sizes
    assert found.steps == -(-2 * sum(sizes) // 16) and found.training == sum(sizes)
    taken = [share.samples for share in found.blend]
    assert sum(taken) == 16 * found.steps
    assert [share.epochs for share in found.blend] == [n / size for n, size in zip(taken, sizes, strict=True)]
    assert [share.weight for share in found.blend] == [0.5, 0.3, 0.2]
    assert 0 < found.held_out < 60 and len(corpus.validation["validation"]) == found.held_out


def validating(built, *overrides):
    sets = f"data.validation_sets={{alone: {{path: {built / 'small'}}}, two: {{path: {built / 'm*.idx'}}}}}"
    return recipe(built, sets, *overrides)


def test_validation_sets_are_evaluated_by_name_and_whole(built, tmp_path):
    made = validating(built, "data.validation=0.2", "train.eval_batches=100")
    corpus = prepare(made, tmp_path)
    assert list(corpus.validation) == ["validation", "validation/alone", "validation/two"]
    for name, number, size in (("validation/alone", 0, 30), ("validation/two", 1, 90)):
        for dp in (1, 4):
            ranks = [Loader(made, corpus, rank, dp).read_validation()[name] for rank in range(dp)]
            real = [batch for batches in ranks for batch in batches if batch.loss_mask.any()]
            assert len(real) == (17 * size - 1) // 16 and {set_of(batch) for batch in real} == {number}
    found = inspect(made, corpus)
    assert found.validation_sets == {"alone": 31, "two": 95}


def test_other_data_to_evaluate_with_is_other_data(built, tmp_path):
    before = prepare(validating(built), tmp_path).identity
    sets = f"data.validation_sets={{alone: {{path: {built / 'large'}}}}}"
    now = prepare(recipe(built, sets), tmp_path).identity
    places = [line.partition(":")[0] for line in list_data_changes(before, now)]
    assert [place.rpartition(" ")[2] for place in places] == ["alone", "two"]


def test_a_validation_set_that_is_too_small_is_named(built, tmp_path, messages):
    build(tmp_path / "tiny", [[[1, 2]]])
    made = recipe(built, f"data.validation_sets.tiny.path={tmp_path / 'tiny'}")
    with pytest.raises(UsageError, match=r"sets\.tiny") as error:
        prepare(made, tmp_path / "data")
    messages(error.value)


def test_rows_of_every_data_set_say_where_their_padding_begins(tmp_path):
    """Of bytes a row has those of its prompt and its response, and an end; cut, as many as a sample."""
    paths = []
    for name, longest in (("a", 5), ("b", 60)):
        paths.append(tmp_path / f"{name}.jsonl")
        rows = [{"prompt": "?", "response": name * (1 + n % longest)} for n in range(12)]
        paths[-1].write_text("\n".join(map(json.dumps, rows)))
    sft = ("task=sft", "data.source=jsonl", "data.separator=null", "data.validation=0")
    rest = ("data.sequence_length=40", "data.truncation=right", "train.global_batch_size=8")
    for some in (paths[:1], paths[1:], paths):
        blend = (f"data.path={[str(path) for path in some]}", f"data.weights={[1] * len(some)}")
        corpus = prepare(load("demo", (*sft, *rest, *blend)), tmp_path / "tokens")
        for batch in Loader(load("demo", (*sft, *rest, *blend)), corpus, 0, 1).read_training_step(0):
            assert batch.lengths is None and batch.row_lengths is not None
            end = corpus.tokenizer.end_of_text
            for ids, filled in zip(batch.ids.tolist(), batch.row_lengths, strict=True):
                assert (ids[filled:] == [end] * (40 - filled)) and filled <= 40
                assert (ids[filled - 1] == end and ids[filled - 2] != end) or filled == 40
