"""Rows of preferences: what pairs of documents they become, which stay together whatever becomes of them."""

import json

import numpy as np
import pytest

from bundle.data import Loader, prepare
from bundle.data.preferences import list_readable_columns, read_preference
from bundle.data.samples import BLANK_SAMPLE_NUMBER
from bundle.data.sources import CorruptData
from bundle.errors import UsageError
from bundle.recipe import load
from bundle.recipe.data import Data, Fields
from tests.data.test_truncation import documents

DATA = Data(source="jsonl", path=("rows.jsonl",), sequence_length=64)
QUESTION = {"role": "user", "content": "q"}
EARLIER = [QUESTION, {"role": "assistant", "content": "e"}, {"role": "user", "content": "q2"}]


def says(text):
    return {"role": "assistant", "content": text}


def pair(row):
    """(texts of the messages, which are learned) of both conversations."""
    return [
        ([m["content"] for m in each.messages], list(each.learned_turns))
        for each in read_preference(row, DATA)
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": [QUESTION], "chosen": [says("good")], "rejected": [says("bad")]},
        {"messages": [QUESTION], "chosen": says("good"), "rejected": "bad"},
        {"chosen": [QUESTION, says("good")], "rejected": [QUESTION, says("bad")]},
        {
            "messages": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        },
        # as UltraFeedback has it: the prompt stands beside conversations that begin with it
        {"prompt": "q", "chosen": [QUESTION, says("good")], "rejected": [QUESTION, says("bad")]},
    ],
)
def test_forms_of_one_pair(row):
    assert pair(row) == [(["q", "good"], [1]), (["q", "bad"], [1])]


SHARED = {"from": "human", "value": "q"}
# rows as data sets have them, and how each is read
FORMATS = [
    ("trl (prompt, chosen, rejected)", {"prompt": "q", "chosen": "good", "rejected": "bad"}),
    (
        "trl (prompt, chosen, rejected)",
        {"prompt": [QUESTION], "chosen": [says("good")], "rejected": [says("bad")]},
    ),
    ("trl (chosen, rejected)", {"chosen": [QUESTION, says("good")], "rejected": [QUESTION, says("bad")]}),
    (  # UltraFeedback, binarized
        "trl (chosen, rejected)",
        {
            "prompt": "q",
            "prompt_id": "0",
            "messages": [QUESTION, says("good")],
            "chosen": [QUESTION, says("good")],
            "rejected": [QUESTION, says("bad")],
            "score_chosen": 8.0,
        },
    ),
    (
        "ms-swift (messages, rejected_response)",
        {"messages": [QUESTION, says("good")], "rejected_response": "bad"},
    ),
    (
        "ms-swift (messages, rejected_messages)",
        {"messages": [QUESTION, says("good")], "rejected_messages": [QUESTION, says("bad")]},
    ),
    (
        "ms-swift (query, response, rejected_response)",
        {"query": "q", "response": "good", "rejected_response": "bad", "history": []},
    ),
    (
        "alpaca (instruction, chosen, rejected)",
        {"instruction": "q", "input": "", "chosen": "good", "rejected": "bad"},
    ),
    (  # LLaMA-Factory
        "sharegpt (conversations, chosen, rejected)",
        {
            "conversations": [SHARED],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        },
    ),
]


@pytest.mark.parametrize(("format_", "row"), FORMATS)
def test_the_format_of_a_pair_is_found_by_its_fields(format_, row):
    assert row.keys() - set(list_readable_columns(DATA.fields)) <= {"prompt_id", "score_chosen"}
    assert [each.format for each in read_preference(row, DATA)] == [format_, format_]
    assert pair(row) == [(["q", "good"], [1]), (["q", "bad"], [1])]


def test_a_history_is_part_of_the_prompt():
    expected = [(["q", "e", "q2", "good"], [3]), (["q", "e", "q2", "bad"], [3])]
    history = {"history": [["q", "e"]]}
    assert pair({"query": "q2", "response": "good", "rejected_response": "bad"} | history) == expected
    assert pair({"instruction": "q2", "chosen": "good", "rejected": "bad"} | history) == expected
    messages = {"messages": [*EARLIER, says("good")]}
    assert pair(messages | {"rejected_response": "bad"}) == expected
    assert pair(messages | {"rejected_messages": [*EARLIER, says("bad")]}) == expected


def test_a_pair_with_two_prompts_is_refused_until_one_format_is_named(messages):
    row = {"prompt": "p", "instruction": "q", "chosen": "good", "rejected": "bad"}
    with pytest.raises(CorruptData, match=r"fields\.format") as error:
        read_preference(row, DATA)
    assert "trl or alpaca" in str(error.value)
    messages(error.value)
    chosen = DATA.model_copy(update={"fields": Fields(format="alpaca")})
    assert read_preference(row, chosen)[0].messages == [QUESTION, says("good")]
    other = {"prompt": [{"role": "system", "content": "s"}, QUESTION]}
    whole = {"chosen": [QUESTION, says("good")], "rejected": [QUESTION, says("bad")]}
    with pytest.raises(CorruptData, match="field prompt: "):
        read_preference(other | whole, DATA)


@pytest.mark.parametrize("tag", ["label", "kto_tag"])
def test_rows_for_kto_are_not_pairs(tag, messages):
    with pytest.raises(CorruptData, match="task: sft") as error:
        read_preference({"prompt": "q", "completion": "a", tag: True}, DATA)
    messages(error.value)
    assert tag in list_readable_columns(DATA.fields)
    assert pair({"prompt": "q", "chosen": "good", "rejected": "bad", tag: True})


def test_earlier_turns_are_the_prompt_and_are_not_learned():
    expected = [(["q", "e", "q2", "good"], [3]), (["q", "e", "q2", "bad"], [3])]
    assert pair({"prompt": EARLIER, "chosen": "good", "rejected": "bad"}) == expected
    assert pair({"chosen": [*EARLIER, says("good")], "rejected": [*EARLIER, says("bad")]}) == expected
    system = pair({"system": "s", "prompt": EARLIER, "chosen": "good", "rejected": "bad"})
    assert system == [(["s", *texts], [turns[0] + 1]) for texts, turns in expected]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "q", "chosen": "a"}, "field rejected"),
        ({"chosen": "a", "rejected": "b"}, "no prompt"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "the same"),
        ({"chosen": [QUESTION, says("a")], "rejected": [QUESTION, says("a")]}, "the same"),
        ({"prompt": "q", "chosen": [QUESTION, says("a")], "rejected": "b"}, "only one"),
        (
            {"chosen": [QUESTION, says("a")], "rejected": [{"role": "user", "content": "x"}, says("b")]},
            "diff",
        ),
        ({"chosen": [QUESTION, says("a")], "rejected": [QUESTION, says("a"), QUESTION, says("b")]}, "begins"),
        ({"prompt": [QUESTION, says("a")], "chosen": "a", "rejected": "b"}, "field prompt"),
        ({"prompt": "q", "chosen": [QUESTION], "rejected": [QUESTION]}, "field chosen"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "images": ["x"]}, "images: .* 1 .* 0 "),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "videos": ["x"]}, "videos: .* 1 .* 0 "),
    ],
)
def test_rows_that_are_no_pair(row, why, messages):
    assert row.keys() <= set(list_readable_columns(DATA.fields))  # which are read of a table
    with pytest.raises(CorruptData, match=why) as error:
        read_preference(row, DATA)
    messages(error.value)


LENGTH = 64
HEAD = len("### User\n\n### Assistant\n")
# (characters of the question, of the better answer, of the worse one)
SIZES = [(5, 5, 9), (3, 12, 2), (10, 4, 200), (4, 7, 6), (200, 4, 5), (6, 3, 8)]
FIT = [0, 1, 3, 5]


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [{"prompt": "q" * q, "chosen": "c" * c, "rejected": "r" * r} for q, c, r in SIZES]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def recipe(rows, *overrides):
    keys = [f"data.path={rows}", "data.source=jsonl", "data.validation=0", f"data.sequence_length={LENGTH}"]
    portions = ["train.global_batch_size=4", "train.micro_batch_size=1"]
    return load("demo", ["task=dpo", *keys, *portions, *overrides])


def whole(asked, letter, said):
    return f"### User\n{'q' * asked}\n### Assistant\n{letter.upper() * said}\n$"


def both(index):
    asked, better, worse = SIZES[index]
    return [whole(asked, "c", better), whole(asked, "r", worse)]


def test_a_pair_is_left_out_or_cut_as_a_whole(rows, tmp_path):
    with pytest.raises(UsageError) as caught:
        prepare(recipe(rows), tmp_path / "data")
    (said,) = caught.value.violations
    assert said.count(f"{rows}:") == 2 and "data.truncation" in said
    kept = prepare(recipe(rows, "data.truncation=delete"), tmp_path / "data")
    assert kept.formats == {FORMATS[0][0]: len(SIZES)}
    assert documents(kept) == [text for index in FIT for text in both(index)]
    assert kept.left_out.deleted == 2 and len(kept.training) == 4
    cut = prepare(recipe(rows, "data.truncation=right"), tmp_path / "data")
    # of the third only the worse answer is cut; of the fifth no answer would be left
    assert documents(cut) == [text[:LENGTH] for index in (0, 1, 2, 3, 5) for text in both(index)]
    assert (cut.left_out.cut, cut.left_out.deleted) == (1, 1)


@pytest.mark.parametrize("packed", [False, True])
def test_pairs_stay_together_on_every_rank(rows, tmp_path, packed):
    keys = ["data.truncation=delete", "data.validation=0.25", "train.eval_batches=1"]
    keys += ["data.packed=true", "data.sequence_length=160"] if packed else ["train.micro_batch_size=2"]
    job = recipe(rows, *keys, "parallel.tp=1")
    corpus = prepare(job, tmp_path / "data")
    seen, held = [], []
    for rank in range(2):
        loader = Loader(job, corpus, rank, 2)
        found = [batch for batches in loader.read_training_samples_once() for batch in batches]
        seen += [numbers for batch in found for numbers in batch.documents.reshape(-1, 2).tolist()]
        evaluated = loader.read_validation()["validation"]
        held += [numbers for batch in evaluated for numbers in batch.documents.reshape(-1, 2).tolist()]
        for batch in (*found, *evaluated):
            lengths = np.asarray(batch.lengths or [LENGTH] * len(batch.ids))
            assert (batch.lengths is not None) == packed and len(batch.documents) == len(lengths)
            ids, mask = batch.ids.flatten().numpy(), batch.loss_mask.flatten().numpy()
            for end, size, number in zip(np.cumsum(lengths), lengths, batch.documents, strict=True):
                at = slice(end - size, end)
                letters = {chr(i) for i in ids[at][mask[at] > 0] if i < 256} - {"\n"}
                assert (
                    letters <= ({"c"}, {"r"})[number % 2]
                    if number != BLANK_SAMPLE_NUMBER
                    else not mask[at].any()
                )
    real = [numbers for numbers in (*seen, *held) if BLANK_SAMPLE_NUMBER not in numbers]
    assert (
        sorted(real) == [[0, 1], [2, 3], [4, 5], [6, 7]]
        and len([n for n in held if BLANK_SAMPLE_NUMBER not in n]) == 1
    )
    assert all(
        set(numbers) == {BLANK_SAMPLE_NUMBER} for numbers in (*seen, *held) if BLANK_SAMPLE_NUMBER in numbers
    )


def test_what_a_recipe_may_say(rows, messages):
    larger = recipe(rows, "train.micro_batch_size=2")
    assert recipe(rows).dpo.beta == 0.1 and larger.micro_batch_full_rows == 4
    assert load("demo").dpo is None and recipe(rows).loss_mean == "sequence"
    for keys, named in (
        (["task=sft", "dpo.beta=0.2"], "dpo: "),
        (["data.source=text"], "data.source: "),
        (["dpo.label_smoothing=0.5"], "dpo.label_smoothing: "),
        (["dpo.beta=0"], "dpo.beta: "),
    ):
        with pytest.raises(UsageError) as caught:
            recipe(rows, *keys)
        assert any(named in violation for violation in caught.value.violations), keys
        messages(caught.value)
