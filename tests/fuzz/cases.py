"""Commands as a careless or a hostile user gives them, each of them made from a number alone."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import typer

from bundle.cli import LazyVerbGroup, app
from bundle.recipe import Recipe, load
from bundle.recipe.document import to_yaml
from tests.data import chat
from tests.pretrained import directories
from tests.reference import weights

Words = list[str]
LONG = "a" * 5000
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 3, 7, 2**31 - 1, 2**63, 10**400, 0.0, -0.5, 1e-320, 1e308, float("nan"),
    float("inf"), "", " ", "x", "auto", "bytes", "chat", "plain", "hf", "hf:", "hf:tokenizer", LONG,
    "\0", "\u202e\u2028", "\ud83d\ude00", "../..", "/proc/self/mem", "/dev/zero", "/proc", "rows.jsonl",
    "model", "*", "[", "a: b", "&a", "!!python/object:os.system", [], [None], ["x", 1], [[]], {},
    {"x": 1}, {"": {}},
)  # fmt: skip
PLACES = (
    "", ".", "/", "..", "/proc", "/dev/null", "model", "rows.jsonl", "rows.jsonl/below", "made/run",
    "made/a b", "made/\u00e9", LONG, "made/\0", "~", "-", "made/../made/x",
)  # fmt: skip
CACHES = ("/proc", "/dev/null", "rows.jsonl", "rows.jsonl/below", "made/cache", LONG, "made/\0")
SMALL = {
    "name": "small", "task": "sft", "backend": "cpu",
    "model": {"path": "model", "weights": "random", "dtype": "fp32"},
    "data": {
        "source": "jsonl", "path": ["rows.jsonl"], "tokenizer": "bytes", "template": "plain",
        "sequence_length": 64, "validation": 0.1,
    },
    "train": {"steps": 2, "global_batch_size": 2, "micro_batch_size": 1}, "optimizer": {"lr": 0.001},
}  # fmt: skip
MODEL = {
    "model_type": "qwen2", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 10000.0,
    "max_position_embeddings": 128, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip
VERBS_WITH_FLAGS = (
    ["plan", "small.yaml"], ["tune", "small.yaml"], ["train", "small.yaml", "--dry-run"],
    ["check", "small.yaml"], ["recipes", "show", "demo"],
    ["doctor"], ["resolve"], ["patches", "list"], ["patches", "plan"], ["report", "made"],
    ["launch", "slurm", "small.yaml", "--dry-run"], ["launch", "kubernetes", "small.yaml"],
    ["launch", "local", "small.yaml", "--dry-run"], ["launch", "docker", "small.yaml", "--dry-run"],
    ["launch", "list"], ["weights", "check", "model"], ["weights", "export", "model", "made/out"],
    ["init", "--model=model", "--data=rows.jsonl", "--output=made/recipe.yaml"],
)  # fmt: skip
KEYS = sorted(set(Recipe.list_key_paths()) - {"data.cache"})  # where that says, tokens are written
GOOD = {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]}


def write_inputs(folder: Path) -> None:
    """What every command finds: rows, a text, a tokenizer and the directory of a tiny model."""
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(GOOD) for _ in range(40)))
    (folder / "text.txt").write_text("some text\n" * 400)
    chat.directory(folder / "tokenizer")
    _write_model(folder / "model")
    (folder / "small.yaml").write_text(to_yaml(SMALL))


def _write_model(path: Path, shards: int = 1) -> dict[str, dict[str, Any]]:
    """A directory of `MODEL`; the header of each file."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODEL))
    shapes = weights.shapes(MODEL)
    names = list(shapes)
    found = {
        f"model-{n}.safetensors": directories.header({name: shapes[name] for name in names[n::shards]})
        for n in range(shards)
    }
    directories.write_index(path, found)
    for file, of in found.items():
        directories.write_file(path / file, of)
    return found


def make_case(number: int, folder: Path) -> Words:
    """The words of command `number`; the files that it names are written into `folder`."""
    random = Random(number)
    return [word.replace("\0", "\\0") for word in KINDS[number % len(KINDS)](random, folder)]


def _mutate_mapping(random: Random, values: dict[str, Any], keys: list[str]) -> None:
    """Changes one to three values, or drops, adds or misspells a key; `keys` are dotted."""
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        *above, last = random.choice(keys).split(".")
        section = values
        for name in above:
            inner = section.get(name)
            section = inner if isinstance(inner, dict) else section.setdefault(name, {}) or section
            if not isinstance(section, dict):
                return
        match random.randrange(6):
            case 0:
                section.pop(last, None)
            case 1:
                section[last[:-1] + random.choice("xs_ ")] = random.choice(VALUES)
            case _:
                section[last] = _value_like(random, section.get(last))


def _value_like(random: Random, value: Any) -> Any:
    """Another value for one that stands there: of its kind, or of any."""
    if random.random() < 0.4:
        return random.choice(VALUES)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * random.choice([0, -1, 2, 3, 8, 1000, 2**20]) + random.choice([0, 0, 1, -1])
    if isinstance(value, list) and value:
        return random.choice([value * 2, value[1:], [*value, random.choice(VALUES)]])
    return random.choice([1, 2, 4, 16, 0.5, True, "full", "chat", ["rows.jsonl"], {}])


def _mutate_text(random: Random, text: str) -> str:
    """The text cut, doubled in part, or with a character of another kind in it."""
    at, length = random.randrange(len(text) + 1), random.randint(1, 40)
    match random.randrange(5):
        case 0:
            return text[:at]
        case 1:
            return text[:at] + text[at : at + length] * 3 + text[at:]
        case 2:
            return text[:at] + text[at + length :]
        case 3:
            return (
                text[:at]
                + random.choice(["\0", "\t", "{", "[" * 3000, "&a ", "*a", "'", "\ufeff"])
                + text[at:]
            )
    return text.replace(random.choice("abcdefgh:{}[]\n "), random.choice(["", "\n", ":", '"', "9" * 400]), 3)


def _recipe(random: Random, folder: Path) -> Words:
    source = load("demo").dump() if random.random() < 0.4 else json.loads(json.dumps(SMALL))
    keys = KEYS
    if random.random() < 0.7:  # those that the recipe has are not all defaults
        keys = [key for key in keys if key.partition(".")[0] in source]
    _mutate_mapping(random, source, keys)
    if random.random() < 0.5:
        text = json.dumps(source)
    else:
        text = to_yaml({key: value for key, value in source.items() if value != 10**400})
    if random.random() < 0.3:
        text = _mutate_text(random, text)
    (folder / "case.yaml").write_bytes(text.encode(errors="surrogatepass"))
    return [random.choice(["plan", "plan", "check"]), "case.yaml"]


def _override(random: Random, folder: Path) -> Words:
    words = [random.choice(["plan", "check", "train"]), random.choice(["demo", "small.yaml", "small.yaml"])]
    for _ in range(random.choice([1, 1, 1, 2])):
        key = random.choice(KEYS)
        value = _value_like(random, random.choice([1, 0.5, None, True]))
        text = value if isinstance(value, str) else json.dumps(value)
        words.append(f"--set={key}{random.choice(['='] * 12 + ['', '=='])}{text}")
    return words + (["--dry-run"] if words[0] == "train" else [])


def _flags(random: Random, folder: Path) -> Words:
    verb = random.choice(VERBS_WITH_FLAGS)
    command: Any = typer.main.get_command(app)
    for name in verb[: 1 + (verb[0] in ("launch", "patches", "recipes", "weights"))]:
        command = (
            command.get_command(None, name) if isinstance(command, LazyVerbGroup) else command.commands[name]
        )
    flags = {option for of in command.params for option in of.opts if option.startswith("--")}
    # They write where they are told, ask a cluster, or train.
    flags -= {"--job", "--output", "--apply", "--write", "--measure"}
    texts = [str(value) for value in VALUES if isinstance(value, str | int) and value != "\0"]
    words = list(verb)
    for _ in range(random.randint(1, 3)):
        words.append(
            random.choice(sorted(flags or {"--nowhere"}))
            if random.random() < 0.9
            else random.choice([*texts, "--nowhere"])
        )
        if random.random() < 0.7:
            words.append(
                random.choice([*texts, "h200", "cuda", "0.16.1", "HOST:1", "a=b", "made/x", "1", "2"])
            )
    return words


def _rows(random: Random, folder: Path) -> Words:
    rows: list[Any] = []
    for _ in range(random.randint(1, 12)):
        row: Any = json.loads(json.dumps(GOOD))
        keys = [
            "messages",
            "prompt",
            "chosen",
            "rejected",
            "response",
            "images",
            "tools",
            "text",
            "conversations",
        ]
        match random.randrange(6):
            case 0:
                row[random.choice(keys)] = random.choice(VALUES)
            case 1:
                row["messages"][random.randrange(2)][
                    random.choice(["role", "content", "tool_calls", "weight"])
                ] = random.choice(VALUES)
            case 2:
                row = random.choice(VALUES)
            case 3:
                row = {random.choice(keys): random.choice(VALUES) for _ in range(3)}
        rows.append(row)
    lines = [json.dumps(row) for row in rows]
    if random.random() < 0.4:
        lines.append(_mutate_text(random, lines[0]))
    text = random.choice(["\n", "\n", "\r\n", ",\n"]).join(lines)
    (folder / "case.jsonl").write_bytes(text.encode(errors="surrogatepass"))
    sets = [
        f"data.on_error={random.choice(['skip', 'stop'])}",
        f"task={random.choice(['sft', 'sft', 'sft', 'dpo', 'pretrain'])}",
    ]
    template = random.choice(["plain", "chat"])
    sets += [f"data.template={template}"] + (["data.tokenizer=hf:tokenizer"] if template == "chat" else [])
    sets += [f"data.source={random.choice([*['jsonl'] * 12, 'text', 'parquet', 'megatron'])}"]
    return ["check", "small.yaml", "--set=data.path=case.jsonl", *(f"--set={each}" for each in sets)]


def _places(random: Random, folder: Path) -> Words:
    words = [random.choice(["plan", "check", "train"]), "small.yaml"]
    flags = ["--run-directory", "--run-directory", "--from", "data.path", "data.cache", "data.tokenizer"]
    for flag in random.sample(flags, random.choice([1, 1, 2])):
        place = random.choice(PLACES if flag != "data.cache" else CACHES)
        words.append(f"{flag}={place}" if flag.startswith("--") else f"--set={flag}={json.dumps(place)}")
    return words + (["--dry-run"] if words[0] == "train" else [])


def _template(random: Random, folder: Path) -> Words:
    text = random.choice(
        [chat.SIMPLE, chat.BARE, chat.FORGETFUL, "{{ messages }}", "{{ x.y.z }}", "{% for %}"]
    )
    for _ in range(random.randint(0, 3)):
        text = _mutate_text(random, text)
    path = folder / "case-tokenizer"
    path.mkdir(exist_ok=True)
    for file in (folder / "tokenizer").iterdir():
        content = file.read_text(errors="surrogatepass")
        if random.random() < 0.2:
            content = random.choice(["", "null", "[]", "{}", content[:-9], _mutate_text(random, content)])
        (path / file.name).write_bytes(content.encode(errors="surrogatepass"))
    (path / "chat_template.jinja").write_bytes(text.encode(errors="surrogatepass"))
    return ["check", "small.yaml", "--set=data.tokenizer=hf:case-tokenizer", "--set=data.template=chat"]


def _config(random: Random, folder: Path) -> Words:
    path = folder / "case-model"
    path.mkdir(exist_ok=True)
    values: dict[str, Any] = dict(MODEL)
    more = [
        "rope_scaling",
        "rope_parameters",
        "num_labels",
        "architectures",
        "head_dim",
        "hidden_act",
        "text_config",
    ]
    more += ["quantization_config", "layer_types", "sliding_window", "id2label", "num_experts"]
    _mutate_mapping(random, values, [*MODEL, *more, "rope_scaling.factor", "rope_scaling.rope_type"])
    text = json.dumps(values)
    (path / "config.json").write_text(_mutate_text(random, text) if random.random() < 0.2 else text)
    return [random.choice(["plan", "check"]), "small.yaml", "--set=model.path=case-model"]


def _weights(random: Random, folder: Path) -> Words:
    path = folder / "case-model"
    found = _write_model(path, random.choice([1, 2]))
    file, of = random.choice(sorted(found.items()))
    name = random.choice(sorted(of))
    _mutate_mapping(random, of[name], ["dtype", "shape", "data_offsets"])
    if random.random() < 0.3:
        of[random.choice(["", "x", LONG, "__metadata__"])] = random.choice(VALUES)
    content = json.dumps(of).encode()
    if random.random() < 0.3:
        content = _mutate_text(random, content.decode()).encode(errors="surrogatepass")
    directories.write_file(path / file, content, random.choice([0, 100, 200_000]))
    if random.random() < 0.2:
        (path / file).write_bytes(random.randbytes(random.randint(0, 40)))
    verb = random.choice(
        [["plan", "small.yaml", "--set=model.path=case-model", "--set=model.weights=load"], []]
    )
    return verb or ["weights", "check", "case-model"]


KINDS: tuple[Callable[[Random, Path], Words], ...] = (
    _recipe, _override, _flags, _rows, _places, _template, _config, _weights,
)  # fmt: skip
