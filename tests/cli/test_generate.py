"""`mcore-bundle generate`: a model that has learned a few rows by heart says them, and how it is refused."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from bundle.cli.generate import AnswerPrinter, compute_max_answer_tokens
from bundle.errors import UsageError
from tests import command
from tests.data.chat import SIMPLE, directory

RED, BLUE = "What is red?", "What is blue?"
ROWS = {RED: "A poppy in June.", BLUE: "Nobody knows: ask again."}
MODEL = {
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}

STEPS = {"steps": 70, "global_batch_size": 2, "micro_batch_size": 2, "eval_interval": 0}


def train(place: Path, data: dict, answers: dict = ROWS, **sections: dict) -> Path:
    """The run of a model that is trained until it knows the rows by heart."""
    rows = [{"prompt": question, "response": answer} for question, answer in answers.items()]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "name": "heart",
        "task": "sft",
        "model": {"config": MODEL, "dtype": "fp32"},
        "data": {
            "source": "jsonl",
            "path": [str(place / "rows.jsonl")],
            "sequence_length": 96,
            "validation": 0,
        }
        | data,
        "train": STEPS,
        "optimizer": {"lr": 5e-3, "warmup_steps": 5},
        "metrics": {"tensorboard": False},
        "checkpoint": {"interval": 0},
    } | sections
    (place / "heart.yaml").write_text(json.dumps(recipe))
    command.finish(command.start_training(str(place / "heart.yaml"), place / "run", (), "--backend=cpu"))
    return place / "run"


def generate(capfd, *words: str | Path) -> tuple[int, str, str]:
    """(what the command would end with, what it printed, what it said of errors)."""
    capfd.readouterr()
    return command.call_bundle("generate", *words), *capfd.readouterr()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    pytest.importorskip("megatron.core")
    pytest.importorskip("transformers")
    return train(tmp_path_factory.mktemp("plain"), {"tokenizer": "bytes", "template": "plain"})


@pytest.mark.world
def test_what_was_learned_is_said(run, capfd):
    asked = [word for question in ROWS for word in ("--prompt", question)]
    code, out, err = generate(capfd, run, *asked, "--json")
    assert code == 0, err
    found = [json.loads(line) for line in out.splitlines()]
    assert {one["prompt"]: one["answer"].strip() for one in found} == ROWS
    # A turn ends with a line and the end of text.
    assert [one["tokens"] for one in found] == [len(answer) + 2 for answer in ROWS.values()]


@pytest.mark.world
def test_a_checkpoint_and_one_prompt_are_enough(run, capfd):
    code, out, err = generate(capfd, run / "checkpoints" / "step-00000070", f"--prompt={RED}")
    assert (code, out.strip()) == (0, ROWS[RED]), err
    code, out, _ = generate(capfd, run, f"--prompt={RED}", "--max-tokens=7")
    assert (code, out.rstrip("\n")) == (0, "A poppy")


def test_tokens_are_printed_as_they_come(monkeypatch):
    """Each piece at once; a character of several tokens when it is whole."""
    from bundle.data.tokenizers import ByteTokenizer

    decode, pieces = ByteTokenizer().decode, []
    stream = AnswerPrinter(decode, [256], as_json=False)
    monkeypatch.setattr("builtins.print", lambda *words, **_: pieces.append("".join(words)))
    ids = [*"a é, 中!\n".encode(), 256]
    after = []
    for token in ids:
        stream.add(token)
        after.append("".join(pieces))
    assert after[:5] == ["a", "a ", "a ", "a é", "a é,"]
    assert after[-1] == "a é, 中!\n"
    stream.close("?", ids)
    assert "".join(pieces) == "a é, 中!\n"
    stream.begin("again")
    pieces.clear()
    stream.add(0xC3)
    stream.close("again", [0xC3])
    assert "".join(pieces) == "\N{REPLACEMENT CHARACTER}", "half a character is printed at the end"


@pytest.mark.parametrize(
    ("wanted", "length", "positions", "expected"),
    [
        (None, 10, 128, 118),
        (None, 10, 4096, 128),
        (None, 10, None, 128),
        (118, 10, 128, 118),
        (7, 10, None, 7),
    ],
)
def test_an_answer_ends_where_the_positions_do(wanted, length, positions, expected):
    pytest.importorskip("torch")
    from bundle.packing.prompts import Prompt

    prompts = [Prompt([1]), Prompt([1] * length)]
    assert compute_max_answer_tokens(wanted, prompts, positions) == expected
    if positions is not None:
        with pytest.raises(UsageError, match="--max-tokens"):
            compute_max_answer_tokens(positions - length + 1, prompts, positions)
        with pytest.raises(UsageError, match="--prompt"):
            compute_max_answer_tokens(wanted, [Prompt([1] * positions)], positions)


@pytest.mark.world
@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--prompt=a", "--max-tokens=1000000"], "--max-tokens"),
        (["--prompt=a", "--prompt", "a" * 100, "--max-tokens=90"], "--max-tokens"),
        (["--prompt", "a" * 200], "--prompt"),
    ],
)
def test_more_tokens_than_positions_are_refused(run, words, option, capfd):
    code, out, err = generate(capfd, run, *words)
    assert (code, out) == (2, "") and option in err and "128" in err


@pytest.mark.world
@pytest.mark.slow
def test_a_lora_run_answers_without_an_export(chatting, tmp_path, capfd):
    """The greedy tokens are those of transformers with the adapter that PEFT loads."""
    peft = pytest.importorskip("peft")
    import torch
    from transformers import AutoModelForCausalLM

    from bundle.data.prompts import PromptBuilder

    base = tmp_path / "base"
    shutil.copytree(chatting / "hf", base)
    model = {
        "path": str(base),
        "dtype": "fp32",
        "lora": {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]},
    }
    data = {"tokenizer": f"hf:{base}", "template": "chat"}
    sections: dict[str, dict] = {
        "model": model,
        "train": STEPS | {"steps": 20},
        "optimizer": {"lr": 2e-2, "warmup_steps": 0},
    }
    other = dict(zip(ROWS, reversed(ROWS.values()), strict=True))
    lora = train(tmp_path, data, other, **sections, checkpoint={"interval": 0, "export": "peft"})
    exported = (lora / "peft").rename(tmp_path / "peft")
    code, out, err = generate(capfd, lora, f"--prompt={BLUE}", "--max-tokens=20", "--json")
    assert code == 0, err
    writer = PromptBuilder.from_directory(base)
    ids = torch.tensor([list(writer.build_prompt(BLUE, {}).ids)])
    opened = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = {
        "do_sample": False,
        "max_new_tokens": 20,
        "eos_token_id": list(writer.end_tokens),
        "pad_token_id": 0,
    }
    mask = torch.ones_like(ids)
    alone = opened.generate(ids, attention_mask=mask, **settings)[0, ids.shape[1] :].tolist()
    adapted = peft.PeftModel.from_pretrained(opened, exported).eval()
    wanted = adapted.generate(input_ids=ids, attention_mask=mask, **settings)[0, ids.shape[1] :].tolist()
    found = json.loads(out)
    answer = wanted[:-1] if wanted[-1] in writer.end_tokens else wanted
    assert wanted != alone, "the adapter changes the answer"
    assert (found["answer"], found["tokens"]) == (writer.tokenizer.decode(answer), len(wanted))
    code, streamed, _ = generate(capfd, lora, f"--prompt={BLUE}", "--max-tokens=20")
    assert (code, streamed) == (0, f"{found['answer']}\n")
    (weights,) = base.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1
    weights.write_bytes(content)
    code, out, err = generate(capfd, lora, f"--prompt={BLUE}")
    assert (code, out) == (2, "") and weights.name in err, "other weights than it was trained beside"


@pytest.mark.world
def test_what_is_drawn_comes_from_the_seed(run, capfd):
    hot = (f"--prompt={RED}", "--temperature=3", "--max-tokens=40")
    one, same, other = (generate(capfd, run, *hot, f"--seed={seed}") for seed in (1, 1, 2))
    assert one == same and one[1] != other[1]
    # So little mass is the likeliest token, however hot.
    assert generate(capfd, run, *hot[:2], "--top-p=0.0001")[1].strip() == ROWS[RED]


@pytest.fixture(scope="module")
def chatting(tmp_path_factory) -> Path:
    pytest.importorskip("megatron.core")
    pytest.importorskip("transformers")
    place = tmp_path_factory.mktemp("chat")
    data = {"tokenizer": f"hf:{directory(place / 'words', SIMPLE)}", "template": "chat"}
    return train(place, data, checkpoint={"interval": 0, "export": "hf"})


@pytest.mark.world
@pytest.mark.parametrize("part", ["", "hf"])
def test_a_run_and_its_export_answer_by_the_chat_template(chatting, part, capfd):
    code, out, err = generate(capfd, chatting / part, f"--prompt={BLUE}")
    assert (code, out) == (0, f"{ROWS[BLUE]}\n"), err


@pytest.mark.world
@pytest.mark.parametrize("form", [lambda token: token, lambda token: [1, token]])
def test_an_answer_ends_where_its_directory_ends_it_and_with_its_turn(chatting, tmp_path, capfd, form):
    from transformers import AutoTokenizer

    shutil.copytree(chatting / "hf", copy := tmp_path / "copy")
    ids = AutoTokenizer.from_pretrained(copy).encode("Nobody knows:", add_special_tokens=False)
    config = json.loads((copy / "generation_config.json").read_text())
    asking = (copy, f"--prompt={BLUE}")
    for own, answer in ((form(ids[-1]), "Nobody knows:"), (None, ROWS[BLUE])):
        (copy / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": own}))
        code, out, err = generate(capfd, *asking)
        assert (code, out) == (0, f"{answer}\n"), err


@pytest.mark.world
def test_an_export_says_where_its_turns_end(chatting):
    """Its config names no end, and every server asks this file."""
    transformers = pytest.importorskip("transformers")
    said = json.loads((chatting / "hf" / "generation_config.json").read_text())
    words = transformers.AutoTokenizer.from_pretrained(chatting / "hf")
    assert said["eos_token_id"] == [words.convert_tokens_to_ids("<end>")]


@pytest.mark.world
def test_a_directory_without_one_of_its_tensors_is_not_asked(chatting, tmp_path, capfd):
    safetensors = pytest.importorskip("safetensors.torch")
    shutil.copytree(chatting / "hf", tmp_path / "hf")
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    tensors = safetensors.load_file(file)
    *_, lost = sorted(tensors)
    del tensors[lost]
    safetensors.save_file(tensors, file, {"format": "pt"})
    code, out, err = generate(capfd, tmp_path / "hf", f"--prompt={BLUE}")
    assert code == 2 and not out and lost in err


@pytest.mark.world
def test_the_pages_command_runs(run, tmp_path, monkeypatch, capfd):
    page = Path(__file__).parents[2] / "docs" / "pretrained.md"
    *_, shown = re.findall(r"^\$ mcore-bundle generate (.*)$", page.read_text(), re.MULTILINE)
    place, *words = shlex.split(shown)
    (tmp_path / place).parent.mkdir()
    (tmp_path / place).symlink_to(run)
    monkeypatch.chdir(tmp_path)
    code, out, _ = generate(capfd, place, *words)
    assert (code, out.count("> ")) == (0, 2)


def test_a_directory_that_is_not_there_is_refused_before_torch_is_imported(tmp_path):
    script = (
        "import sys\nfrom bundle.cli import main\ntry:\n    main()\n"
        "except SystemExit as end:\n    print(end.code, 'torch' in sys.modules)"
    )
    done = command.run_bundle("generate", tmp_path / "none", "--prompt=a", program=("-c", script))
    assert done.stdout.split() == ["2", "False"] and str(tmp_path / "none") in done.stderr


def test_what_is_no_run_is_said(tmp_path, capfd):
    pytest.importorskip("torch")
    code, _, err = generate(capfd, tmp_path / "none", "--prompt=a")
    assert code == 2 and f"{tmp_path / 'none'}: " in err and "Warning" not in err
    assert generate(capfd, tmp_path)[0] == 2  # nothing is asked
