"""Task rl: keys and defaults, and every violation that a recipe alone decides, all of them at once."""

import copy
import itertools
import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundle.errors import UsageError
from bundle.recipe import from_mapping, load
from bundle.recipe.rl_rules import compute_max_prompt_completion_length, split_function

MATH = {"kind": "math", "field": "answer", "pattern": "#### (.+)"}
PYTHON = {"kind": "python", "function": "mine.py:polite", "weight": 0.1}
HTTP = {"kind": "http", "url": "http://127.0.0.1:8000/judge"}
CODE = {"kind": "code", "tests": "tests"}
RL = {
    "prompts_per_step": 8,
    "num_generations": 4,
    "rollout": {"max_completion_length": 64, "stop": []},
    "evaluation": {"path": ["test.jsonl"]},
    "rewards": [MATH, PYTHON],
}


def build(*overrides, **rl):
    values = load("demo").dump()
    values |= {"name": "mine", "task": "rl", "rl": copy.deepcopy(RL) | rl, "dpo": None}
    values["data"] = {"path": ["train.jsonl"], "sequence_length": 128}
    values["train"] = {"steps": 300, "micro_batch_size": 8}
    return from_mapping(values, overrides=overrides)


def collect_violations(*overrides, **rl) -> dict[str, str]:
    with pytest.raises(UsageError) as caught:
        build(*overrides, **rl)
    assert caught.value.code == 2
    lines = [re.sub(r"^--set .*?: (?=[a-z_.0-9]+: )", "", line) for line in caught.value.violations]
    return {line.partition(": ")[0]: line for line in lines}


def test_the_recipe_of_the_documentation_is_read():
    recipe = build("rl.loss={kind: ppo, clip: [0.2, 0.28], entropy: 0.0, kl: 0.0, mean: token}")
    rl = recipe.rl
    assert (recipe.task, rl.answers_per_step, rl.max_failed, rl.max_flat_steps) == ("rl", 32, 0.1, 50)
    assert (rl.evaluation.interval, rl.evaluation.samples, rl.rollout.temperature) == (20, 1, 1.0)
    assert [reward.timeout_seconds for reward in rl.rewards] == [5.0, 60.0]
    assert (recipe.data.validation, recipe.train.global_batch_size) == (0.0, 32)
    assert from_mapping(recipe.dump()) == recipe


def test_a_recipe_of_another_task_has_no_section():
    assert load("demo").rl is None


@pytest.mark.parametrize(
    ("kind", "clip", "mean"),
    [
        ("ppo", (0.2, 0.28), "token"),
        ("gspo", (0.0003, 0.0004), "sequence"),
        ("cispo", (1.0, 0.28), "token"),
    ],
)
def test_each_loss_has_bounds_and_a_mean_of_its_own(kind, clip, mean):
    recipe = build(loss={"kind": kind})
    assert (recipe.rl.loss.clip, recipe.rl.loss.mean, recipe.loss_mean) == (clip, mean, mean)
    assert build(loss={"kind": "ppo", "clip": [0.1, 0.3], "mean": "sequence"}).rl.loss.clip == (0.1, 0.3)


def test_the_constant_divisor_counts_answers_of_a_step_and_tokens_of_an_answer():
    assert build().rl.divisor_per_answer is None
    assert build(loss={"mean": "constant"}).rl.divisor_per_answer == 64
    assert build(loss={"mean": "constant", "divisor": 3.0}).rl.divisor_per_answer == 3
    assert build(loss={"mean": "constant"}).loss_mean == "token"


# (key, what is laid over the recipe, the value that the message names)
BROKEN = [
    ("rl.num_generations", {"num_generations": 1}, "1"),
    ("rl.rollout.top_p", {"rollout": {"max_completion_length": 64, "top_p": 0.9}}, "0.9"),
    ("data.sequence_length", {"rollout": {"max_completion_length": 128}}, "128"),
    ("rl.overlong_buffer", {"overlong_buffer": 65}, "65"),
    ("rl.discount", {"discount": 0.9}, "0.9"),
    ("rl.loss.divisor", {"loss": {"divisor": 3}}, "3"),
    ("rl.loss.clip", {"loss": {"clip": [1.5, 0.2]}}, "1.5"),
    ("rl.loss.clip", {"loss": {"clip": [0.5, -0.2]}}, "-0.2"),
    ("rl.loss.mean", {"loss": {"kind": "gspo", "mean": "token"}}, "token"),
    ("rl.loss.dual_clip", {"loss": {"kind": "cispo", "dual_clip": 3}}, "3"),
    ("rl.loss.correction", {"loss": {"correction": {}}}, "rollout"),
    (
        "rl.loss.correction.low",
        {"old_log_probs": "trainer", "loss": {"correction": {"kind": "mask", "low": 2, "high": 2}}},
        "2",
    ),
    ("rl.loss.correction.low", {"old_log_probs": "trainer", "loss": {"correction": {"low": 0.5}}}, "0.5"),
    (
        "rl.loss.correction.level",
        {"old_log_probs": "trainer", "loss": {"correction": {"level": "geometric"}}},
        "geometric",
    ),
    ("rl.loss.temperature", {"old_log_probs": "trainer", "loss": {"temperature": 0.7}}, "0.7"),
    ("rl.evaluation.source", {"evaluation": {"path": ["x"], "source": "text"}}, "text"),
    ("rl.rewards.1.weight", {"rewards": [MATH, PYTHON | {"weight": 0}]}, "0"),
    ("rl.rewards.0.function", {"rewards": [MATH | {"function": "a.py:b"}]}, "a.py:b"),
    ("rl.rewards.0.pattern", {"rewards": [MATH | {"pattern": "(a"}]}, "(a"),
    ("rl.rewards.0.pattern", {"rewards": [MATH | {"pattern": "(a)(b)"}]}, "(a)(b)"),
    ("rl.rewards.0.function", {"rewards": [{"kind": "python"}]}, "FILE.py:NAME"),
    ("rl.rewards.0.function", {"rewards": [PYTHON | {"function": "mine.polite"}]}, "mine.polite"),
    ("rl.rewards.0.field", {"rewards": [PYTHON | {"field": "answer"}]}, "answer"),
    ("rl.rewards.0.pattern", {"rewards": [PYTHON | {"pattern": "x"}]}, "x"),
    ("rl.rewards.0.kind", {"rewards": [{"kind": "judge"}]}, "judge"),
    ("rl.rewards.0.feild", {"rewards": [MATH | {"feild": "answer"}]}, "rl.rewards.field"),
    ("rl.rewards", {"rewards": []}, "[]"),
    ("rl.max_failed", {"max_failed": 1.5}, "1.5"),
    ("rl.warm_start_steps", {"warm_start_steps": 1000000}, "1000000"),
    ("rl.dynamic_sampling", {"dynamic_sampling": 3, "advantage": "reinforce_plus_plus"}, "3"),
    ("rl.loss.kl", {"warm_start_steps": 1, "loss": {"kl": 0.25}}, "0.25"),
    ("rl.rewards.0.url", {"rewards": [{"kind": "http"}]}, "http"),
    ("rl.rewards.0.url", {"rewards": [CODE | {"url": "https://u:hidden@host/x?key=hidden"}]}, "...@host/x"),
    ("rl.rewards.0.url", {"rewards": [HTTP | {"url": "ftp://host/x"}]}, "ftp://host/x"),
    ("rl.rewards.0.url", {"rewards": [HTTP | {"url": "file:///etc/passwd"}]}, "file:///etc/passwd"),
    ("rl.rewards.0.url", {"rewards": [HTTP | {"url": "u:hidden@host/x?hidden"}]}, "...@host/x"),
    ("rl.rewards.0.url", {"rewards": [HTTP | {"url": "http://host:port/x?hidden"}]}, "http://host:port/x"),
    ("rl.rewards.0.url", {"rewards": [HTTP | {"url": "http://host/a b"}]}, "http://host/a b"),
    ("rl.rewards.0.url", {"rewards": [HTTP | {"url": "http://host/#hidden"}]}, "http://host/"),
    ("rl.rewards.0.url", {"rewards": [HTTP | {"url": "http://:80/"}]}, "http://:80/"),
    ("rl.rewards.0.url", {"rewards": [HTTP | {"url": "http://[::1/"}]}, "http://[::1/"),
    ("rl.rewards.0.tests", {"rewards": [{"kind": "code"}]}, "code"),
    ("rl.rewards.0.tests", {"rewards": [MATH | {"tests": "checks"}]}, "checks"),
    ("rl.rewards.0.field", {"rewards": [CODE | {"field": "answer"}]}, "answer"),
    ("rl.rewards.0.pattern", {"rewards": [HTTP | {"pattern": "("}]}, "("),
    ("rl.rewards.0.function", {"rewards": [HTTP | {"function": "mine.polite"}]}, "mine.polite"),
    ("rl.rewards.0.memory_gib", {"rewards": [CODE | {"memory_gib": 0.0}]}, "0"),
]
BATCH, LONGEST = "train.global_batch_size=32", "rl.rollout.max_completion_length=128"
BROKEN_ELSEWHERE = [
    ("train.global_batch_size", ["train.global_batch_size=24"], "24"),
    ("train.epochs", ["train.steps=null", "train.epochs=2"], "2"),
    ("data.validation", ["data.validation=0.1"], "0.1"),
    ("data.validation_sets", ["data.validation_sets={more: {path: x.jsonl}}"], "more"),
    ("data.truncation", ["data.truncation=left"], "left"),
    ("data.source", ["data.source=text"], "rl needs rows"),
    ("checkpoint.keep_best", ["checkpoint.keep_best=accuracy", "rl.evaluation=null"], "accuracy"),
    (
        "checkpoint.keep_best",
        [BATCH, "task=pretrain", "rl=null", "checkpoint.keep_best=accuracy"],
        "pretrain",
    ),
    ("rl", [BATCH, "rl=null"], "rewards"),
    ("rl", [BATCH, "task=sft"], "sft"),
    (
        "rl.rollout.max_completion_length",
        ["rl.rollout.max_completion_length=256", "data.sequence_length=512"],
        "256",
    ),
    # A pack of 130 tokens has room for 128, where cp needs multiples of 4.
    (
        "data.sequence_length",
        ["data.packed=true", "data.sequence_length=130", "parallel.cp=2", LONGEST],
        "128",
    ),
    ("train.early_stop", ["train.early_stop={patience: 2}"], "data.validation"),
]


@pytest.mark.parametrize(("key", "rl", "value"), BROKEN)
def test_a_violation_names_key_and_value(key, rl, value, messages):
    violations = collect_violations(**rl)
    assert violations.keys() == {key} and value in violations[key].removeprefix(key)
    assert "hidden" not in violations[key]
    messages(violations[key])


@pytest.mark.parametrize(("key", "overrides", "value"), BROKEN_ELSEWHERE)
def test_a_violation_of_another_section_names_key_and_value(key, overrides, value, messages):
    violations = collect_violations(*overrides)
    assert key in violations and value in violations[key].removeprefix(key)
    messages(violations[key])


def test_all_violations_come_at_once():
    violations = collect_violations(
        "data.truncation=right",
        num_generations=1,
        rollout={"max_completion_length": 128, "top_p": 0.5},
        rewards=[MATH | {"pattern": "("}, {"kind": "python"}],
        loss={"clip": [2, 0]},
    )
    assert violations.keys() >= {
        *("rl.num_generations", "rl.rollout.top_p", "data.sequence_length", "data.truncation"),
        *("rl.rewards.0.pattern", "rl.rewards.1.function", "rl.loss.clip"),
    }


def test_a_server_and_programs_have_ten_seconds():
    rewards = build(rewards=[HTTP, CODE, CODE | {"timeout_seconds": 2.5, "memory_gib": 4.0}]).rl.rewards
    assert [reward.timeout_seconds for reward in rewards] == [10, 10, 2.5]
    assert [reward.memory_gib for reward in rewards] == [1, 1, 4]
    assert [reward.needs_right_answer for reward in rewards] == [False, True, True]
    for url in ("https://judge.example/a?b=c&d", "http://us:pass@[::1]:80", "http://host"):
        assert build(rewards=[HTTP | {"url": url}]).rl.rewards[0].url == url


def test_an_unknown_key_of_a_reward_hides_no_other_violation():
    violations = collect_violations(rewards=[MATH | {"feild": "x"}], num_generations=1)
    assert violations.keys() == {"rl.rewards.0.feild", "rl.num_generations"}


def test_a_violation_of_a_reward_names_the_line_of_its_key(tmp_path):
    sizes = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    config = {"model_type": "qwen3", "max_position_embeddings": 128, **sizes}
    values = {
        "name": "mine",
        "task": "rl",
        "model": {"config": config, "dtype": "fp32"},
        "data": {"path": "x.jsonl", "sequence_length": 128},
        "train": {"steps": 1},
    }
    lines = [f"{key}: {json.dumps(value)}" for key, value in values.items()]
    lines += ["rl:", "  prompts_per_step: 2", "  num_generations: 2", "  rollout: {max_completion_length: 9}"]
    lines += ["  rewards:", "    - kind: exact", "    - kind: exact", "      pattern: '('"]
    path = tmp_path / "mine.yaml"
    path.write_text("\n".join(lines))
    number = path.read_text().splitlines().index("      pattern: '('") + 1
    with pytest.raises(UsageError) as caught:
        load(path)
    (line,) = caught.value.violations
    assert line.startswith(f"{path}:{number}: rl.rewards.1.pattern: ")


@pytest.mark.parametrize("length", [64, 127, 128, 200])
def test_an_answer_has_room_for_a_question_of_one_token(length):
    overrides, key = [f"data.sequence_length={length}"], "rl.rollout.max_completion_length"
    assert compute_max_prompt_completion_length(build(*overrides, f"{key}=1")) == length
    build(*overrides, f"{key}={length - 1}")
    assert collect_violations(*overrides, f"{key}={length}")


@given(st.text("ab./:_1 é", max_size=12), st.text("ab_1é", max_size=6))
def test_a_function_is_split_at_the_last_colon_behind_py(file, name):
    text = f"{file}.py:{name}"
    if file and name.isidentifier():
        assert split_function(text) == (f"{file}.py", name)
    else:
        with pytest.raises(ValueError, match="FILE"):
            split_function(text)


def test_prompts_times_answers_is_a_multiple_of_the_batch():
    for batch, iterations in itertools.product((8, 16, 32), (1, 3)):
        override = f"train.global_batch_size={batch}"
        assert build(override, num_iterations=iterations).rl is not None


SERVERS = {"max_completion_length": 64, "engine": "sglang"}


def test_servers_have_keys_with_defaults():
    rollout = build(rollout=SERVERS).rl.rollout
    assert (rollout.urls, rollout.python, rollout.replicas, rollout.tp, rollout.arguments) == (
        (),
        None,
        1,
        1,
        (),
    )
    assert (rollout.weights_folder, rollout.verify, rollout.timeout_seconds) == (None, "always", 900.0)
    other = build(rollout=SERVERS | {"urls": ["http://one:30000", "http://10.0.0.1:1/"], "verify": "first"})
    assert other.rl.rollout.urls == ("http://one:30000", "http://10.0.0.1:1/")
    assert from_mapping(other.dump()) == other


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"urls": ["http://one"]}, {"urls"}),
        ({"urls": ["https://one:1"]}, {"urls"}),
        ({"urls": ["http://one:0"]}, {"urls"}),
        ({"urls": ["http://one:65536"]}, {"urls"}),
        ({"urls": ["http://one:1/v1"]}, {"urls"}),
        ({"urls": ["http://user@one:1"]}, {"urls"}),
        ({"urls": ["http://one:1", "http://one:1"]}, {"urls"}),
        (
            {"urls": ["http://one:1"], "python": "x", "replicas": 2, "tp": 2, "arguments": ["--x"]}
            | {"transport": "files"},
            {"python", "replicas", "tp", "arguments", "transport"},
        ),
        ({"arguments": ["--port", "1"]}, {"arguments"}),
        ({"arguments": ["--api-key=mine"]}, {"arguments"}),
        ({"top_p": 0.9}, {"top_p"}),
        ({"timeout_seconds": 0}, {"timeout_seconds"}),
        ({"timeout_seconds": math.inf}, {"timeout_seconds"}),
        ({"timeout_seconds": 86_401}, {"timeout_seconds"}),
        ({"engine": "transformers", "urls": ["http://one:1"], "tp": 2}, {"urls", "tp"}),
        ({"engine": "vllm"}, {"engine"}),
        ({"transport": "nccl"}, {"transport"}),
    ],
)
def test_keys_of_servers_that_cannot_be(changes, keys):
    assert collect_violations(rollout=SERVERS | changes).keys() == {f"rl.rollout.{key}" for key in keys}
