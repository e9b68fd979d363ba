"""`mcore-bundle weights`: what each verb says, writes and ends with; the page's commands, in their order."""

import json
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest

from bundle.checkpoints import manifest
from tests.command import call_bundle, run_bundle
from tests.pretrained.directories import write
from tests.reference.configs import CONFIGS

PAGE = Path(__file__).parents[2] / "docs" / "pretrained.md"


def run(*words: str | Path) -> int:
    """What the process would end with."""
    return call_bundle("weights", *words)


@pytest.fixture
def said(capfd):
    """What was printed since the last call: (standard output, standard error)."""
    return lambda: capfd.readouterr()


def shorten(error: str) -> str:
    """The first two lines of a message that names many tensors, and its last one."""
    lines = error.splitlines()
    return "\n".join([*lines[:2], lines[-1]])


def test_check_says_that_all_is_there(tmp_path, said, messages):
    write(tmp_path / "model", shards=2)
    assert run("check", tmp_path / "model") == 0
    messages(said().out)


def test_check_says_all_that_is_wrong_at_once(tmp_path, said, messages):
    place = tmp_path / "model"
    (of,) = write(place).values()
    renamed = {key.replace("layers.3.", "layers.9."): value for key, value in of.items()}
    from tests.pretrained.directories import write_file

    write_file(place / "model.safetensors", renamed)
    assert run("check", place) == 2
    error = said().err
    assert set(re.findall(r"layers\.\d", error)) == {"layers.3", "layers.9"}
    messages(shorten(error))


def job_of(place: Path, model: dict, tokenizer: str = "hf:none") -> Path:
    """A recipe of such a model."""
    job = {
        "name": "j",
        "model": model,
        "data": {"source": "text", "path": ["none"], "tokenizer": tokenizer, "sequence_length": 64},
        "train": {"steps": 1, "global_batch_size": 1},
    }
    place.write_text(json.dumps(job))
    return place


def test_check_holds_a_directory_against_the_recipes_own_model(tmp_path, said, messages):
    """Which may name a directory of its own: that one's config counts, not that of what is checked."""
    write(tmp_path / "model")
    write(tmp_path / "theirs", shards=2)
    own = tmp_path / "own"
    own.mkdir()
    other = CONFIGS["qwen2"] | {"hidden_size": 64, "rms_norm_eps": 3e-5}
    (own / "config.json").write_text(json.dumps(other))
    for model in ({"path": str(own)}, {"config": other}):
        assert run("check", tmp_path / "model", job_of(tmp_path / "job.yaml", model)) == 2
        error = said().err
        assert all(value in error for value in ("norm_epsilon: 0.01 ", "3e-05", "[48]", "[64]"))
        messages(shorten(error))
    job = job_of(tmp_path / "job.yaml", {"path": str(tmp_path / "theirs")})
    assert run("check", tmp_path / "model", job) == 0, said()
    assert run("check", tmp_path / "model", job_of(tmp_path / "job.yaml", {"config": CONFIGS["qwen2"]})) == 0
    assert run("check", own, job) == 2
    messages(said().err)


def test_check_names_the_words_by_which_layers_of_prediction_are_left_out(tmp_path, said, messages):
    """As transformers saves a DeepSeek-V3: the config names a layer that is not there."""
    place, config = tmp_path / "model", CONFIGS["glm4_moe"] | {"num_nextn_predict_layers": 2}
    write(place, "glm4_moe")
    (place / "config.json").write_text(json.dumps(config))
    for verb in (("check", place), ("import", place, tmp_path / "out")):
        assert run(*verb) == 2
        error = said().err
        assert "--mtp-layers 0" in error
        messages(shorten(error))
    assert run("check", place, "--mtp-layers", "0") == run("check", place, "--mtp-layers", "1") == 0
    assert run("check", place, "--mtp-layers", "3") == 2
    error = said().err
    assert "--mtp-layers 3: " in error and f"{place}/config.json" in error
    messages(error)
    job = job_of(tmp_path / "job.yaml", {"path": str(place)})
    assert run("check", place, job) == 2
    error = said().err
    assert "model.mtp.layers: 0 " in error
    messages(shorten(error))
    assert run("check", place, job_of(job, {"path": str(place), "mtp": {"layers": 0}})) == 0
    assert run("check", place, job, "--mtp-layers", "0") == 2


def test_check_imports_no_torch(tmp_path):
    write(tmp_path / "model")
    code = "import sys; from bundle.cli import main; main.__globals__['app'](standalone_mode=False); "
    code += "assert not {'torch', 'numpy', 'megatron'} & set(sys.modules)"
    run_bundle("weights", "check", "--headers", tmp_path / "model", program=("-c", code), code=0)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny Qwen3 with random weights, as a directory of the Hub's."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    torch.manual_seed(5)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 130}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = transformers.Qwen3Config(**sizes, **heads, max_position_embeddings=64)
    model = transformers.Qwen3ForCausalLM(config).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5, 0.2)
    place = tmp_path_factory.mktemp("hub")
    model.save_pretrained(place / "Qwen3-8B")
    (place / "Qwen3-8B" / "chat_template.jinja").write_text("{{ messages }}")
    return place


def test_the_pages_commands_run_in_their_order(models, tmp_path, said, monkeypatch):
    shutil.copytree(models / "Qwen3-8B", tmp_path / "Qwen3-8B")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```console\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    shown = [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    commands = [shlex.split(line.partition(" #")[0])[2:] for line in shown if " weights " in line]
    assert {words[0] for words in commands} == {"check", "import", "export", "diff"}
    ends = {" ".join(words): run(*words) for words in commands}
    wanted = {command: int("FP8" in command and command.startswith("diff")) for command in ends}
    assert ends == wanted, said()


def test_what_was_imported_and_exported_is_what_it_was(models, tmp_path, said):
    theirs = models / "Qwen3-8B"
    assert run("import", theirs, tmp_path / "megatron") == 0
    assert run("export", tmp_path / "megatron", tmp_path / "back", "--like", theirs) == 0
    assert run("diff", theirs, tmp_path / "back") == 0
    assert run("diff", theirs, tmp_path / "megatron") == 0
    assert "equal: 25" in said().out
    assert (tmp_path / "back" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert run("export", tmp_path / "megatron", tmp_path / "fp8", "--like", theirs, "--dtype", "fp8") == 0
    assert run("check", tmp_path / "fp8") == 0
    assert run("diff", tmp_path / "megatron", tmp_path / "fp8", "--json") == 1
    differences = [json.loads(line) for line in said().out.splitlines() if line.startswith("{")]
    assert {found["kind"] for found in differences} == {"dtype"}
    assert all(0 < found["relative"] <= 1 / 16 for found in differences)
    assert len(differences) == 14, "seven linear layers of two decoder layers"


COPIES = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}


def test_a_round_trip_of_multi_token_prediction_is_equal(tmp_path, said):
    """DeepSeek-V3 has copies in its layer; the second one here has none, and gets none."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    from safetensors.torch import load_file, save_file

    from tests.reference import weights

    config = CONFIGS["deepseek_v3"]
    theirs = {name: value.detach().bfloat16() for name, value in weights.drawn(config, seed=3).items()}
    theirs |= {name: value.float() for name, value in theirs.items() if name.endswith("correction_bias")}
    of_layer = {f"model.layers.4.{copy}.weight": f"{original}.weight" for copy, original in COPIES.items()}
    theirs |= {copy: theirs[original].clone() for copy, original in of_layer.items()}
    model, megatron, back = (tmp_path / name for name in ("model", "megatron", "back"))
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    save_file(theirs, model / "model.safetensors")
    assert run("import", model, megatron) == 0, said()
    assert run("export", megatron, back, "--like", model) == 0, said()
    ours = load_file(back / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert not [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    said()
    for pair in ((model, back), (model, megatron), (megatron, model)):
        assert run("diff", *pair) == 0
        assert f"equal: {len(theirs)}" in said().out
    copy = next(iter(of_layer))
    theirs[copy] += 1
    save_file(theirs, model / "model.safetensors")
    assert run("import", model, tmp_path / "other") == 2
    assert copy in said().err and not (tmp_path / "other").exists()


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_written(
    models, tmp_path, said, messages
):
    assert run("import", models / "Qwen3-8B", tmp_path / "megatron") == 0
    other = tmp_path / "other"
    write(other, "qwen3")
    assert run("export", tmp_path / "megatron", tmp_path / "out", "--like", other) == 2
    error = said().err
    assert "[2, 64, 96]" in error and "[4, 48, 80]" in error
    assert not (tmp_path / "out").exists()
    messages(shorten(error))
    assert run("export", tmp_path / "megatron", tmp_path / "out") == 2
    error = said().err
    assert "--like DIR" in error
    messages(error)
    (tmp_path / "megatron" / "release" / ".metadata").write_bytes(b"cos\nsystem\n(S'touch run'\ntR.")
    assert run("export", tmp_path / "megatron", tmp_path / "out", "--like", other) == 2
    error = said().err
    assert "os.system" in error
    messages(error)
    for place in ("nothing", "other"):
        assert run("export", tmp_path / place, tmp_path / "out", "--like", other) == 2
        error = said().err
        assert f"{tmp_path / place}: " in error
        messages(error)


def tokenizer(directory: Path, tokens: str, template: str) -> None:
    """A tokenizer of letters with a chat template of its own, beside whatever is in the directory."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, "?"))
    theirs = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="?", chat_template=template)
    theirs.save_pretrained(directory)


def trained(directory: Path, model: Path, tokenizer: str) -> Path:
    """A run that has kept the weights of a Hugging Face directory, which it names as it is given."""
    assert run("import", model, directory.with_suffix(".torch_dist")) == 0
    step = directory / "checkpoints" / "step-00000001"
    step.mkdir(parents=True)
    (directory.with_suffix(".torch_dist") / "release").rename(step / "megatron")
    manifest.write(
        step, {name: manifest.compute_digest(step / name) for name in manifest.list_file_names(step)}
    )
    job_of(directory / "recipe.yaml", {"path": str(model)}, tokenizer)
    return directory


def test_a_run_is_exported_with_the_tokenizer_that_it_was_trained_with(
    models, tmp_path, said, messages, monkeypatch
):
    from transformers import AutoTokenizer

    model, own, out = (tmp_path / name for name in ("model", "own", "out"))
    shutil.copytree(models / "Qwen3-8B", model)
    template = "what it was trained with"
    tokenizer(model, "?abc", "the model's own")
    tokenizer(own, "?cba", template)
    (own / "chat_template.jinja").unlink(missing_ok=True)  # as transformers 4 has it
    config = json.loads((own / "tokenizer_config.json").read_text())
    config["chat_template"] = template
    (own / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    ours = trained(tmp_path / "run", model, "hf:own")
    assert run("export", ours, out) == 0
    found = AutoTokenizer.from_pretrained(out)
    assert found.get_chat_template() == template
    assert found.convert_tokens_to_ids(["c", "a"]) == [1, 3]

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert run("export", ours, "out") == 2
    messages(said().err)
    assert not list(elsewhere.iterdir()), "nothing is half written"
    assert run("export", ours, "out", "--like", model) == 0
    assert AutoTokenizer.from_pretrained("out").get_chat_template() == "the model's own"


def everything(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_no_verb_replaces_what_it_reads_or_what_others_wrote(models, tmp_path, said, messages, monkeypatch):
    model, mine, out = tmp_path / "model", tmp_path / "mine", tmp_path / "out"
    shutil.copytree(models / "Qwen3-8B", model)
    tokenizer(model, "?abc", "a template")
    ours = trained(tmp_path / "runs" / "sft", model, f"hf:{model}")
    mine.mkdir()
    (mine / "thesis.txt").write_text("years")
    monkeypatch.chdir(model)
    before = everything(tmp_path)
    for words in (
        ("export", ours, ours),
        ("export", ours, tmp_path / "runs"),
        ("export", ours / "checkpoints" / "step-00000001", ours, "--force"),
        ("export", ours, model, "--force"),  # what the run's recipe names is read as well
        ("export", ours, model, "--like", model, "--force"),
        ("import", model, model),
        ("import", model, "."),
        ("import", model, model / "megatron", "--force"),
        ("export", ours, mine),
        ("import", model, mine),
        ("import", mine.parent / "runs" / "sft", ours / "recipe.yaml"),
    ):
        said()
        assert run(*words) == 2, words
        assert everything(tmp_path) == before, words
        messages(said().err)
    assert run("export", ours, mine, "--force") == 0
    assert not (mine / "thesis.txt").exists()
    for words in (("export", ours, out), ("export", ours, out), ("import", model, out)):
        assert run(*words) == 0, said().err


_KILLED = """
import os, sys
from bundle.pretrained import writing
append, left = writing.SafetensorsFileWriter.append, int(sys.argv.pop(1))
def one_less(file, values):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), 9)
    append(file, values)
writing.SafetensorsFileWriter.append = one_less
from bundle.cli import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 20])
def test_a_killed_export_leaves_the_old_directory_whole(models, tmp_path, tensor):
    theirs, out = models / "Qwen3-8B", tmp_path / "out"
    assert run("import", theirs, tmp_path / "megatron") == 0
    assert run("export", tmp_path / "megatron", out, "--like", theirs) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    words = ["export", tmp_path / "megatron", out, "--like", theirs, "--dtype", "fp8"]
    run_bundle("weights", *words, program=("-c", _KILLED, str(tensor)), code=-signal.SIGKILL)
    assert (tmp_path / ".out.partial").exists(), "it was killed while it wrote"
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert run(*words) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["megatron", "out"]
    assert (out / "model.safetensors").read_bytes() != before["model.safetensors"]


QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}


def test_an_fp8_export_is_as_deepseek_publishes(models, tmp_path):
    """What each file and the config say, read without any code of ours."""
    import torch
    from safetensors.torch import load_file

    theirs, out = models / "Qwen3-8B", tmp_path / "fp8"
    assert run("import", theirs, tmp_path / "megatron") == 0
    assert run("export", tmp_path / "megatron", out, "--like", theirs, "--dtype", "fp8") == 0
    assert json.loads((out / "config.json").read_text())["quantization_config"] == QUANTIZATION
    plain, stored = load_file(theirs / "model.safetensors"), load_file(out / "model.safetensors")
    linear = {name for name in plain if name.endswith("_proj.weight")}
    assert stored.keys() == plain.keys() | {f"{name}_scale_inv" for name in linear}
    for name, value in plain.items():
        if name not in linear:
            assert torch.equal(stored[name], value), name
            continue
        assert stored[name].dtype == torch.float8_e4m3fn
        scale = stored[f"{name}_scale_inv"]
        assert scale.dtype == torch.float32
        rows, columns = value.shape
        wide = torch.kron(scale, torch.ones(128, 128))[:rows, :columns]
        bound = torch.maximum(value.float().abs() / 16, wide / 1024) * (1 + 1e-6)
        assert ((stored[name].float() * wide - value.float()).abs() <= bound).all(), name


def test_the_verbs_say_what_they_take():
    assert run("check") == 2
    assert run("export", "a", "b", "--dtype", "int4") == 2
