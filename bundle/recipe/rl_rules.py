"""Check what task rl needs of a recipe, without a machine; report every violation with key and value."""

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from bundle.errors import format_value
from bundle.recipe.recipe import Recipe
from bundle.recipe.rl import RL, RLCorrection, RLReward, RLRollout

# (the key to change, what is wrong with it)
Violation = tuple[str, str]

# `FILE.py:NAME`; a path may hold colons.
_FILE_FUNCTION_PATTERN = re.compile(r"(?P<file>.+\.py):(?P<name>[^\W\d]\w*)")
# Keys of a reward that only some kinds read, and what a message asks for where one of them must be present.
_REWARD_KINDS_BY_KEY = {
    "field": ("exact", "math"),
    "pattern": ("exact", "math"),
    "function": ("python",),
    "url": ("http",),
    "tests": ("code",),
}
_MANDATORY_REWARD_KEY_DESCRIPTIONS = {
    "function": "FILE.py:NAME",
    "url": "the address of a server",
    "tests": "the name of the field with the tests",
}
_SERVER_URL_PATTERN = re.compile(r"http://(?P<host>[\w.-]+):(?P<port>\d{1,5})/?")
# Keys of rl.rollout for an engine with servers. _LAUNCHED_SERVER_KEYS: only for servers that the run starts.
_LAUNCHED_SERVER_KEYS = ("python", "replicas", "tp", "mem_fraction_static", "arguments", "transport")
_SERVER_KEYS = ("urls", *_LAUNCHED_SERVER_KEYS, "weights_folder", "verify", "timeout_seconds")
# What the run says itself when it starts a server.
_RESERVED_SERVER_ARGUMENTS = (
    "--model-path", "--model", "--host", "--port", "--api-key", "--admin-api-key", "--load-format", "--tp",
    "--tp-size", "--tensor-parallel-size", "--base-gpu-id", "--skip-tokenizer-init", "--dtype",
    "--mem-fraction-static",
)  # fmt: skip


def split_function(function: str) -> tuple[str, str]:
    """Return the file and the name of `FILE.py:NAME`. Raise ValueError for any other text."""
    match = _FILE_FUNCTION_PATTERN.fullmatch(function)
    if match is None:
        raise ValueError(f"{format_value(function)} is not FILE.py:NAME")
    return match["file"], match["name"]


def split_host_port_url(url: str) -> tuple[str, int]:
    """Return host and port of `http://HOST:PORT`. Raise ValueError for any other text."""
    match = _SERVER_URL_PATTERN.fullmatch(url)
    if match is None or not 0 < int(match["port"]) < 2**16:
        raise ValueError(f"{format_value(url)} is not http://HOST:PORT")
    return match["host"], int(match["port"])


def find_violations(recipe: Recipe) -> Iterator[Violation]:
    """Yield every rule of task rl that the recipe breaks."""
    rl = recipe.rl
    if rl is None:
        if recipe.task_traits.samples_answers:
            yield "rl", "missing. Task rl needs prompts_per_step, num_generations and rewards."
        return
    if not recipe.task_traits.samples_answers:
        return  # a section of another task is a violation itself
    yield from _check_sampling_and_advantages(rl)
    yield from ((f"rl.rollout.{key}", reason) for key, reason in _check_server_keys(rl.rollout))
    yield from _check_lengths(recipe, rl)
    yield from _check_training(recipe, rl)
    yield from _check_data(recipe)
    if not rl.rewards:
        yield "rl.rewards", "[] has no reward. Add one, such as {kind: exact, field: answer}."
    for number, reward in enumerate(rl.rewards):
        yield from ((f"rl.rewards.{number}.{key}", reason) for key, reason in _check_reward(reward))
    yield from _check_loss(rl)


def _check_sampling_and_advantages(rl: RL) -> Iterator[Violation]:
    if rl.num_generations < 2:
        yield "rl.num_generations", "1 answer per question leaves nothing to compare. Set it to 2 or more."
    if rl.rollout.top_p < 1:
        yield (
            "rl.rollout.top_p",
            f"{rl.rollout.top_p:g} would bias the ratios of the loss, which needs the probabilities of all"
            " tokens. Set it to 1.",
        )
    longest = rl.rollout.max_completion_length
    if rl.overlong_buffer > longest:
        yield (
            "rl.overlong_buffer",
            f"{rl.overlong_buffer} exceeds rl.rollout.max_completion_length {longest}.",
        )
    if rl.discount != 1 and rl.advantage != "reinforce_plus_plus":
        yield (
            "rl.discount",
            f"{rl.discount:g} has no effect with rl.advantage {rl.advantage}. Set it to 1, or set"
            " rl.advantage to reinforce_plus_plus.",
        )
    if rl.dynamic_sampling and rl.advantage == "reinforce_plus_plus":
        yield (
            "rl.dynamic_sampling",
            f"{rl.dynamic_sampling} has no effect with rl.advantage reinforce_plus_plus, which also learns"
            " from groups with equal rewards. Set it to 0.",
        )
    if rl.loss.mean != "constant" and rl.loss.divisor is not None:
        yield (
            "rl.loss.divisor",
            f"{rl.loss.divisor:g} has no effect with rl.loss.mean: {rl.loss.mean}. Remove it, or set"
            " rl.loss.mean: constant.",
        )


def _check_server_keys(rollout: RLRollout) -> Iterator[Violation]:
    """Yield what is wrong with the keys of servers, by the keys of rl.rollout."""
    changed = {key for key in _SERVER_KEYS if getattr(rollout, key) != RLRollout.model_fields[key].default}
    if rollout.engine != "sglang":
        for key in sorted(changed):
            yield key, f"is not read with rl.rollout.engine {rollout.engine}. Set sglang, or remove it."
        return
    if rollout.urls:
        for key in sorted(changed.intersection(_LAUNCHED_SERVER_KEYS)):
            yield key, "is not read with rl.rollout.urls, whose servers run already. Remove one of them."
    for url in rollout.urls:
        try:
            split_host_port_url(url)
        except ValueError as error:
            yield "urls", f"{error}. Name each server in this form."
    if len({*rollout.urls}) < len(rollout.urls):
        yield "urls", "names a server more than once. Name each of them once."
    for argument in rollout.arguments:
        if argument.partition("=")[0] in _RESERVED_SERVER_ARGUMENTS:
            yield "arguments", f"{argument} is set by the run itself. Remove it."


def compute_max_prompt_completion_length(recipe: Recipe) -> int:
    """Return the tokens that a question with its answer may have: of a row or a pack, and of the model."""
    room = recipe.data.sequence_length
    if recipe.data.packed:
        room = room // recipe.alignment.sequence_multiple * recipe.alignment.sequence_multiple
    return min(room, recipe.architecture.max_position_embeddings)


def _check_lengths(recipe: Recipe, rl: RL) -> Iterator[Violation]:
    longest, length = rl.rollout.max_completion_length, recipe.data.sequence_length
    room = compute_max_prompt_completion_length(recipe)
    if longest < room:  # one token of a question, at least
        return
    limit = "positions of the model" if room == recipe.architecture.max_position_embeddings else "tokens"
    unit = "pack" if recipe.data.packed else "row"
    rounding = f" ({length} rounded down for the parallel layout)" if room < length else ""
    if limit == "tokens":
        yield (
            "data.sequence_length",
            f"{length} is too small. A {unit} of {room} tokens{rounding} must hold a question and an answer"
            f" of up to {longest} tokens. Raise it, or lower rl.rollout.max_completion_length.",
        )
    else:
        yield (
            "rl.rollout.max_completion_length",
            f"{longest} leaves no room for a question within the {room} {limit}. Lower it.",
        )


def _check_training(recipe: Recipe, rl: RL) -> Iterator[Violation]:
    train, checkpoint, answers = recipe.train, recipe.checkpoint, rl.answers_per_step
    if answers % train.global_batch_size:
        yield (
            "train.global_batch_size",
            f"{train.global_batch_size} does not divide the {answers} answers of a step"
            f" (rl.prompts_per_step {rl.prompts_per_step} x rl.num_generations {rl.num_generations}).",
        )
    if train.epochs is None and rl.warm_start_steps >= train.steps:
        yield (
            "rl.warm_start_steps",
            f"{rl.warm_start_steps} is not less than train.steps {train.steps}, so no step learns from"
            " rewards. Lower it, or raise train.steps.",
        )
    if rl.warm_start_steps and rl.loss.kl and recipe.model.lora is None:
        yield (
            "rl.loss.kl",
            f"{rl.loss.kl:g} would undo the warm start (rl.warm_start_steps {rl.warm_start_steps}), because"
            " the KL reference is the model before it. Set one of the two keys to 0.",
        )
    if train.epochs is not None:
        yield "train.epochs", f"{train.epochs:g} has no effect with task rl. Set train.steps instead."
    if rl.old_log_probs == "trainer" and rl.loss_temperature != rl.rollout.temperature:
        yield (
            "rl.loss.temperature",
            f"{rl.loss_temperature:g} differs from rl.rollout.temperature {rl.rollout.temperature:g}, but"
            " rl.old_log_probs: trainer needs equal temperatures. Leave it out.",
        )
    if checkpoint.keep_best is not None and rl.evaluation is None:
        yield (
            "checkpoint.keep_best",
            f"'{checkpoint.keep_best}' needs an evaluation. Set rl.evaluation.path.",
        )


def _check_data(recipe: Recipe) -> Iterator[Violation]:
    data = recipe.data
    if data.validation:
        yield (
            "data.validation",
            f"{data.validation:g} has no effect with task rl. Set it to 0, and use rl.evaluation instead.",
        )
    if data.validation_sets:
        names = ", ".join(map(format_value, data.validation_sets))
        yield "data.validation_sets", f"task rl does not read the sets {names}. Use rl.evaluation instead."
    if data.truncation in ("left", "right"):
        yield (
            "data.truncation",
            f"'{data.truncation}' cuts long questions, which changes them. Set it to 'error' or 'delete'.",
        )
    evaluation = recipe.rl.evaluation if recipe.rl else None
    if evaluation is not None and evaluation.source in ("text", "megatron"):
        yield (
            "rl.evaluation.source",
            f"'{evaluation.source}' files have no rows with questions. Use jsonl, parquet or arrow files.",
        )


def _check_reward(reward: RLReward) -> Iterator[Violation]:
    """Yield what is wrong with a reward, by its own keys."""
    if reward.weight == 0:
        yield "weight", "0 gives this reward no effect. Remove the reward, or set another weight."
    for key, kinds in _REWARD_KINDS_BY_KEY.items():
        value = getattr(reward, key)
        if value is not None and reward.kind not in kinds:
            shown = redact_url(value) if key == "url" else value
            owner = " or ".join(map(format_value, kinds))
            yield (
                key,
                f"this key ({format_value(shown)}) is only for kind {owner}, but kind is '{reward.kind}'."
                " Remove it.",
            )
        elif value is None and reward.kind in kinds and key in _MANDATORY_REWARD_KEY_DESCRIPTIONS:
            yield key, f"missing. Kind '{reward.kind}' needs {_MANDATORY_REWARD_KEY_DESCRIPTIONS[key]}."
    if reward.kind == "python" and reward.function is not None:
        try:
            split_function(reward.function)
        except ValueError as error:
            yield "function", f"{error}. Name a file and a function in it, such as mine.py:polite."
    if reward.kind == "http" and reward.url is not None and not _is_web_url(reward.url):
        yield (
            "url",
            f"{format_value(redact_url(reward.url))} is not a web address. Write http://HOST:PORT/PATH or"
            " https://HOST:PORT/PATH, without spaces or #.",
        )
    if reward.pattern is not None and reward.kind in _REWARD_KINDS_BY_KEY["pattern"]:
        yield from _check_pattern(reward.pattern)


def _check_pattern(pattern: str) -> Iterator[Violation]:
    try:
        groups = re.compile(pattern).groups
    except (re.error, RecursionError, OverflowError) as error:
        yield "pattern", f"{format_value(pattern)} is not a regular expression ({error}). Correct it."
    else:
        if groups > 1:
            yield (
                "pattern",
                f"{format_value(pattern)} has {groups} groups. Keep one, and write the others as (?:...).",
            )


def redact_url(url: str) -> str:
    """Return what a message may show of an address: no user, password, query or fragment."""
    text = re.split(r"[?#]", url, maxsplit=1)[0]
    _, sign, rest = text.rpartition("@")
    return f"...@{rest}" if sign else text


def _is_web_url(url: str) -> bool:
    if not re.fullmatch(r"https?://[!-~]+", url) or "#" in url:
        return False
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _check_loss(rl: RL) -> Iterator[Violation]:
    loss = rl.loss
    low, high = loss.clip
    if not (0 <= low <= 1 and high >= 0):
        yield (
            "rl.loss.clip",
            f"[{low:g}, {high:g}] is out of range. The first must be from 0 to 1, the second at least 0.",
        )
    if loss.kind == "gspo" and loss.mean != "sequence":
        yield (
            "rl.loss.mean",
            f"'{loss.mean}' does not fit rl.loss.kind: gspo, whose ratio is per answer. Set it to"
            " 'sequence'.",
        )
    if loss.kind == "cispo" and loss.dual_clip is not None:
        yield "rl.loss.dual_clip", f"{loss.dual_clip:g} has no effect with rl.loss.kind cispo. Remove it."
    if loss.correction is not None:
        if rl.old_log_probs != "trainer":
            yield (
                "rl.loss.correction",
                f"needs the trainer's log-probabilities, but rl.old_log_probs is '{rl.old_log_probs}'. Set"
                " rl.old_log_probs: trainer.",
            )
        for key, reason in _check_correction(loss.correction):
            yield f"rl.loss.correction.{key}", reason


def _check_correction(correction: RLCorrection) -> Iterator[Violation]:
    if correction.low >= correction.high:
        yield "low", f"{correction.low:g} must be less than high ({correction.high:g})."
    if correction.kind == "truncate":
        if correction.low:
            yield (
                "low",
                f"{correction.low:g} is only for kind 'mask', but kind is 'truncate'. Set it to 0.",
            )
        if correction.level == "geometric":
            yield "level", "'geometric' is only for kind 'mask', but kind is 'truncate'. Set kind: mask."
