"""The digits of scikit-learn are read after a run of the demo, in every kind of layout alike."""

import pytest

from tests.command import finish, start_training
from tests.vision import rows
from tests.vision.rows import digits
from tests.vision.test_training import LAYOUTS, packs

RIGHT = 0.95  # of 300 held out, of which one is 0.0033; another seed makes 0.01 of difference


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The images, the rows and the tokenizer."""
    pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("digits") / "digits"
    digits.make(directory)
    return directory


@pytest.mark.releases  # some minutes each
@pytest.mark.parametrize("layout", ["one process", "tp2 and sequence parallel", "packed cp2"])
def test_digits_are_read(shown, tmp_path, layout):
    paths = [f"data.path=[{shown}/train.jsonl]", f"data.tokenizer=hf:{shown}/tokenizer"]
    how = packs(1152) if layout.startswith("packed") else []  # as many rows as a step has without packs
    quiet = ["data.validation_sets={}", "train.eval_interval=0"]
    finish(start_training(rows.RECIPE, tmp_path / "run", [*paths, *quiet, *how, *LAYOUTS.get(layout, [])]))
    assert digits.score(shown, tmp_path / "run" / "hf") >= RIGHT


def test_their_tokenizer_pads_as_servers_ask(shown):
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(shown / "tokenizer")(["3", "digits"], padding=True)
    assert len({len(ids) for ids in tokens["input_ids"]}) == 1
