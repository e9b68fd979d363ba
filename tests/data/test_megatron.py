"""Data that megatron's own tools have tokenised: named in a recipe, trained on as it is."""

import re

import numpy as np
import pytest
import torch

from bundle.checkpoints.state import list_data_changes
from bundle.data import Loader, prepare
from bundle.data.corpus import decode_first_samples, inspect
from bundle.errors import UsageError
from bundle.planning.inputs import find_input_output_problems
from bundle.recipe import load
from bundle.recipe.datafiles import expand
from tests.data.test_indexed import build

LENGTH = 16
NAMES = ("small", "large.v2")


def recipe(paths, *overrides):
    paths = ",".join(map(str, paths))
    where = ["data.source=megatron", f"data.path=[{paths}]", f"data.sequence_length={LENGTH}"]
    return load("demo", [*where, "data.separator=null", "data.validation=0.3", *overrides])


@pytest.fixture
def built(tmp_path, monkeypatch):
    """Two data sets of ids below 258, whose values tell them apart: below 100, and from 100 on."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    for name, low, high, count in (("small", 0, 100, 60), ("large.v2", 100, 258, 200)):
        built = [[random.integers(low, high, random.integers(1, 40)).tolist()] for _ in range(count)]
        build(tmp_path / name, built, np.uint16 if name == "small" else np.int32)
    return tmp_path


def flat(prefix, dtype):
    return np.fromfile(f"{prefix}.bin", dtype).tolist()


def test_windows_run_through_the_tokens_as_they_lie_and_nothing_is_copied(built):
    corpus = prepare(recipe([built / "small"], "data.validation=0"), built / "data")
    ids = flat(built / "small", np.uint16)
    assert len(corpus.training) == (len(ids) - 1) // LENGTH and corpus.tokens == len(ids)
    for number in (0, 7, len(corpus.training) - 1):
        batch = corpus.training.build_batch(np.asarray([number]))
        assert batch.ids[0].tolist() == ids[number * LENGTH : number * LENGTH + LENGTH]
        assert batch.labels[0].tolist() == ids[number * LENGTH + 1 : number * LENGTH + LENGTH + 1]
    assert [path.name for path in (built / "data").glob("tokens*/*")] == ["facts.json"]
    assert corpus.conditional_byte_entropy_nats is None


@pytest.mark.parametrize("packed", ["true", "false"])
def test_several_data_sets_are_samples_of_each_and_a_step_is_the_same_on_any_number_of_ranks(built, packed):
    rows = 1 if packed == "true" else 4
    batches = (f"data.packed={packed}", f"train.micro_batch_size={rows}", "train.global_batch_size=16")
    made = recipe([built / name for name in NAMES], *batches)
    corpus = prepare(made, built / "data")
    sizes = [len(prepare(recipe([built / name], *batches), built / "data").training) for name in NAMES]
    assert len(corpus.training) == sum(sizes)

    def step(consumed, dp):
        ranks = [Loader(made, corpus, rank, dp).read_training_step(consumed) for rank in range(dp)]
        if packed == "true":
            return sorted(tuple(b.ids[0].tolist()) for batches in ranks for b in batches)
        return sorted(tuple(row.tolist()) for batches in ranks for b in batches for row in b.ids)

    for consumed in (0, 16 * 9):
        assert step(consumed, 1) == step(consumed, 2) == step(consumed, 4)
    epoch = [corpus.training.build_batch(np.asarray([n])) for n in range(len(corpus.training))]
    assert all(int(b.ids.max()) < 100 for b in epoch[: sizes[0]])
    assert all(int(b.ids.min()) >= 100 for b in epoch[sizes[0] :])
    apart = [prepare(recipe([built / name], *batches), built / "data").training for name in NAMES]
    for part, number, at in ((0, 5, 5), (1, 0, sizes[0]), (1, sizes[1] - 1, sum(sizes) - 1)):
        one, other = apart[part].build_batch(np.asarray([number])), epoch[at]
        assert one.lengths == other.lengths and torch.equal(one.ids, other.ids)
        assert torch.equal(one.labels, other.labels) and torch.equal(one.loss_mask, other.loss_mask)
        assert torch.equal(one.position_ids, other.position_ids)


def test_a_sample_without_loss_has_none_in_any_data_set(built):
    corpus = prepare(recipe([built / name for name in NAMES]), built / "data")
    batch = corpus.training.build_batch(np.asarray([-1, len(corpus.training) - 1, -1]))
    assert batch.loss_mask.sum(1).tolist()[::2] == [0, 0] and batch.loss_mask[1].sum() > 0


@pytest.mark.parametrize("identity", [258, -1, 60000])
def test_an_id_outside_of_the_vocabulary_stops_the_job(built, identity, messages):
    build(built / "wrong", [[[1] * 99], [[1, identity]]])
    with pytest.raises(UsageError, match=rf"wrong\.bin: .* {identity} ") as error:
        prepare(recipe([built / "wrong"]), built / "data")
    messages(error.value)
    assert not list((built / "data").glob("*/")), "nothing may stay of a refused store"


def test_files_that_are_none_are_refused(built, messages):
    (built / "small.bin").write_bytes(b"")
    with pytest.raises(UsageError, match=r"small: .* 0 bytes") as error:
        prepare(recipe([built / "small"]), built / "data")
    messages(error.value)


def test_other_tokens_in_the_same_files_are_noticed(built):
    before = prepare(recipe([built / "small"]), built / "data").identity
    assert list_data_changes(before, prepare(recipe([built / "small"]), built / "data").identity) == []
    tokens = (built / "small.bin").read_bytes()
    (built / "small.bin").write_bytes(tokens[2:] + tokens[:2])
    (line,) = list_data_changes(before, prepare(recipe([built / "small"]), built / "data").identity)
    assert line.startswith("data tokens: was ")


def test_other_documents_of_the_same_tokens_are_noticed(built):
    before = prepare(recipe([built / "small"]), built / "data").identity
    build(built / "whole", [[flat(built / "small", np.uint16)]], np.uint16)
    (built / "whole.idx").replace(built / "small.idx")
    (line,) = list_data_changes(before, prepare(recipe([built / "small"]), built / "data").identity)
    assert line.startswith("data tokens: was ")


@pytest.mark.parametrize("named", ["large.v2", "large.v2.bin", "large.v2.idx", "l*.idx", "folder"])
def test_what_both_names_begin_with_either_file_a_pattern_or_a_folder_is_a_name(built, named):
    (built / "folder").mkdir()
    build(built / "folder" / "x", [[[1]]])
    (path,) = expand([named], "megatron")
    assert path.path.name == ("x.idx" if named == "folder" else "large.v2.idx")


@pytest.mark.parametrize(
    ("named", "gone"), [("nowhere", None), ("small", "small.bin"), ("small", "small.idx")]
)
def test_a_name_that_means_no_two_files_is_told_before_any_rank_starts(built, named, gone):
    if gone:
        (built / gone).unlink()
    with pytest.raises(UsageError) as caught:
        expand([named], "megatron")
    (line,) = caught.value.violations
    assert line.startswith(f"data.path '{named}")
    assert any(line in str(found) for found in find_input_output_problems(recipe([named]), built / "run"))


def test_conversations_need_a_loss_mask_that_these_files_have_not():
    with pytest.raises(UsageError) as caught:
        recipe(["x"], "task=sft")
    assert any("data.source" in line for line in caught.value.violations)


def test_what_check_counts_is_of_all_data_sets(built):
    made = recipe([built / name for name in NAMES])
    corpus = prepare(made, built / "data")
    counted = inspect(made, corpus)
    tokens = len(flat(built / "small", np.uint16)) + len(flat(built / "large.v2", np.int32))
    assert (counted.documents, counted.tokens, counted.learned) == (260, tokens, tokens)


def test_samples_of_files_without_a_named_tokenizer_are_shown_as_ids(built):
    made = recipe([built / "large.v2"])
    (text,) = decode_first_samples(made, prepare(made, built / "data"), 1)
    shown = re.findall(r"\d+", text)
    assert len(shown) == LENGTH + 1 and all(100 <= int(each) < 258 for each in shown)
    assert not re.search(r"[^\d\s⟦⟧]", text)
