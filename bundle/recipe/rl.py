"""The section of a recipe that says how a policy learns from rewards (task rl): keys, values, defaults.

Keys have TRL's names where TRL has them. `rl_rules` holds the checks.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from bundle.recipe.data import DataKind
from bundle.recipe.section import (
    AS_TUPLE,
    CompletedSection,
    Count,
    CountOrZero,
    Names,
    NotNegative,
    Pair,
    Positive,
    Section,
    add_null,
    make_default_section,
)

# The distances of the bounds of a ratio from 1. DAPO arXiv 2503.14476, GSPO 2507.18071, CISPO 2506.13585; a
# low of 1 is no lower bound.
CLIPS = {"ppo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 0.28)}
# Seconds: of one answer (math, code), and of all answers in a call (python, http).
TIMEOUTS = {"exact": 5.0, "math": 5.0, "python": 60.0, "http": 10.0, "code": 10.0}


class RLRollout(Section):
    """How answers are sampled."""

    engine: Literal["transformers", "sglang"] = Field(
        default="transformers",
        description="Who answers. transformers: its own class, in the process of a rank; sglang: servers.",
    )
    temperature: Positive = Field(default=1.0, description="Divides the logits before an answer is sampled.")
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Sample from the likeliest tokens of this probability alone. Only 1 is allowed: the loss"
        " needs the probabilities of all tokens.",
    )
    max_completion_length: Count = Field(default=256, description="Longest answer [tokens].")
    path: str | None = Field(
        default=None,
        min_length=1,
        description="Folder `rollouts` of a run: learn from the answers that it wrote, and ask nothing."
        " null: ask.",
    )
    urls: Names = Field(
        default=(),
        description="sglang: servers that run already, `http://HOST:PORT`; BUNDLE_ROLLOUT_API_KEY and"
        " BUNDLE_ROLLOUT_ADMIN_KEY in the environment open them. []: the run starts servers.",
    )
    python: str | None = Field(
        default=None,
        min_length=1,
        description="sglang: the Python of the environment where SGLang is installed; null: that of the run.",
    )
    replicas: Count = Field(default=1, description="sglang: servers that the run starts.")
    tp: Count = Field(default=1, description="sglang: devices of a server, which divide its tensors.")
    mem_fraction_static: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="sglang: part of a device's memory that a server takes for its weights and cache; null:"
        " what the trainer leaves, as `plan` prints it.",
    )
    arguments: Names = Field(
        default=(), description="sglang: further arguments of each server, such as --attention-backend fa3."
    )
    weights_folder: str | None = Field(
        default=None,
        min_length=1,
        description="sglang: where weights lie for the servers, two versions of them; null: /dev/shm where it"
        " has room, else the run directory.",
    )
    transport: Literal["files", "ipc"] | None = Field(
        default=None,
        description="sglang: how weights come to servers that the run starts. files: as files; ipc: in memory"
        " of the GPU that they open, where the first version gives the same checksums in both ways. null: ipc"
        " for one server on one GPU, else files.",
    )
    verify: Literal["always", "first"] = Field(
        default="always",
        description="sglang: when checksums of the server's weights are compared with what was sent. always"
        " becomes first where it takes more than 2 % of a step.",
    )
    timeout_seconds: float = Field(
        default=900.0,
        gt=0,
        le=86_400,
        description="sglang: seconds until a call to a server is given up.",
    )
    stop: Names = Field(
        default=(),
        description="Texts of one token each that end an answer, beside the tokenizer's end of text and what"
        " the template writes behind a turn.",
    )


class RLEvaluation(Section):
    """Questions that are never learned, and when they are asked: before the first step, too."""

    path: Names = Field(min_length=1, description="As data.path.")
    source: DataKind | None = Field(default=None, description="Kind of the files; null: data.source.")
    interval: CountOrZero = Field(default=20, description="Steps between evaluations; 0: only at the end.")
    samples: Count = Field(
        default=1,
        description="Answers to a question. 1: the accuracy of the greedy answer; more: pass@k of answers at"
        " rollout.temperature.",
    )


class RLReward(CompletedSection):
    """What judges an answer; the reward is the weighted sum over all of them."""

    kind: Literal["exact", "math", "python", "http", "code"] = Field(
        description="exact: 1 for the text of the field, else 0; math: 1 for the same mathematical value, by"
        " math-verify (extra `rl`), else 0; python: a function of yours; http: a server of yours; code: the"
        " share of the row's tests that the answer's program passes."
    )
    weight: float = Field(default=1.0, description="What the reward is multiplied by in the sum.")
    field: str | None = Field(
        default=None,
        min_length=1,
        description="exact, math: the field of a row that has the right answer; dots lead into objects. null:"
        " reward_model.ground_truth (verl) where a row has it, else data.fields.response.",
    )
    pattern: str | None = Field(
        default=None,
        min_length=1,
        description="exact, math: a regular expression that finds the right answer in the field, such as"
        " `#### (.+)`: its group, or all of the match, the last one. null: all of the field.",
    )
    function: str | None = Field(
        default=None,
        min_length=1,
        description="python: `FILE.py:NAME`, a function of (answers: list[str], rows: list[dict]) that"
        " returns a list of numbers; None in it: it cannot judge, and that answer is left out.",
    )
    url: str | None = Field(
        default=None,
        min_length=1,
        description='http: address to POST {"answers": [...], "rows": [...]} to, as JSON. It answers'
        ' {"rewards": [...]}; null in the list: it cannot judge, and that answer is left out.',
    )
    tests: str | None = Field(
        default=None,
        min_length=1,
        description="code: the field of a row that has the tests, dots lead into objects: Python text, or a"
        " list of texts.",
    )
    memory_gib: Positive = Field(default=1.0, description="code: memory of each process of a program [GiB].")
    timeout_seconds: Positive = Field(
        default=5.0,
        json_schema_extra=add_null,
        description="Seconds until a reward is ended, and what it has not judged is left out. math: of one"
        " answer; python, http: of a call. code: seconds of an answer's program; the tests that are left do"
        " not pass. null or left out: 5, python 60, http and code 10.",
    )
    processes: Count = Field(
        default=1, description="Processes that judge on each rank; they share out the rank's answers."
    )

    @property
    def needs_right_answer(self) -> bool:
        """True if a row must have the right answer or tests; a reward of 1 then means a right answer."""
        return self.kind in ("exact", "math", "code")

    @classmethod
    def derive_keys(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the default timeout of the kind of reward."""
        kind = values.get("kind")
        return {"timeout_seconds": TIMEOUTS.get(kind, 5.0)} if isinstance(kind, str) else {}


class RLCorrection(Section):
    """Weights that correct for a rollout engine whose probabilities differ from the trainer's.

    With w = exp(old - rollout), the log-probabilities of the trainer and of the rollout engine.
    """

    kind: Literal["truncate", "mask"] = Field(
        default="truncate",
        description="truncate: multiply by min(w, high), TIS; mask: by w within [low, high], else by 0"
        " (level token: IcePop, sequence: MIS).",
    )
    level: Literal["token", "sequence", "geometric"] = Field(
        default="token",
        description="Whose w: of each token, of all tokens of an answer together, or their geometric mean.",
    )
    low: NotNegative = Field(default=0.0, description="mask: lowest w.")
    high: Positive = Field(default=2.0, description="Highest w.")
    veto: Positive | None = Field(
        default=None,
        description="An answer with a token of a lower w has no part in the loss; null: no veto.",
    )


class RLLoss(CompletedSection):
    """The loss of the policy."""

    kind: Literal["ppo", "gspo", "cispo"] = Field(
        default="ppo",
        description="ppo: clip the ratio of each token; gspo: of each answer; cispo: clip the weight alone.",
    )
    clip: Pair = Field(
        default=CLIPS["ppo"],
        json_schema_extra=add_null,
        description="How far below and above 1 the ratio is clipped. null or left out: [0.2, 0.28], gspo"
        " [0.0003, 0.0004], cispo [1, 0.28].",
    )
    dual_clip: float | None = Field(
        default=None,
        gt=1,
        description="ppo, gspo: bounds the loss of a negative advantage at this multiple of it; null: no"
        " bound.",
    )
    entropy: NotNegative = Field(default=0.0, description="Coefficient of the entropy bonus.")
    kl: NotNegative = Field(
        default=0.0,
        description="Coefficient of the KL divergence from the reference, the model that training begins"
        " with; 0: no reference is kept.",
    )
    kl_kind: Literal["k1", "k2", "k3"] = Field(
        default="k2", description="The estimator; k1 is subtracted from rewards, k2 and k3 are losses."
    )
    mean: Literal["token", "sequence", "constant"] = Field(
        default="token",
        json_schema_extra=add_null,
        description="What counts alike: every token, every answer, or the sum of tokens by a constant"
        " (Dr.GRPO). null or left out: token, gspo sequence.",
    )
    divisor: Positive | None = Field(
        default=None,
        description="mean constant: the tokens of an answer that the constant counts; null:"
        " rollout.max_completion_length.",
    )
    temperature: Positive | None = Field(
        default=None, description="Divides the logits in the loss; null: rollout.temperature."
    )
    correction: RLCorrection | None = Field(
        default=None, description="Correct for another engine's probabilities; null: no correction."
    )

    @classmethod
    def derive_keys(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the default bounds and mean of the kind of loss."""
        kind = values.get("kind", "ppo")
        if not isinstance(kind, str):
            return {}
        return {
            "clip": CLIPS.get(kind, CLIPS["ppo"]),
            "mean": "sequence" if kind == "gspo" else "token",
        }


class RL(Section):
    """Reinforcement learning from rewards; of task rl. Of a step: questions, answers, updates."""

    prompts_per_step: Count = Field(description="Questions of one step.")
    num_generations: Count = Field(description="Answers to each question: a group. At least 2.")
    num_iterations: Count = Field(
        default=1,
        description="How often all answers of a step are learned, in updates of train.global_batch_size.",
    )
    rollout: RLRollout = make_default_section("How answers are sampled.")
    evaluation: RLEvaluation | None = Field(default=None, description="Questions to evaluate with.")
    rewards: Annotated[tuple[RLReward, ...], AS_TUPLE] = Field(
        description="What judges the answers, a list of at least one."
    )
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"] = (
        Field(default="grpo", description="How rewards become advantages.")
    )
    discount: float = Field(
        default=1.0, gt=0, le=1, description="reinforce_plus_plus: what a later token's reward counts for."
    )
    loss: RLLoss = make_default_section("The loss of the policy.")
    old_log_probs: Literal["rollout", "trainer"] = Field(
        default="rollout",
        description="Whose log-probabilities the ratio starts from: the rollout engine's, or the trainer's,"
        " which computes them once more.",
    )
    dynamic_sampling: CountOrZero = Field(
        default=0,
        description="How often a step asks further questions in the place of flat groups, at most (DAPO).",
    )
    overlong_buffer: CountOrZero = Field(
        default=0,
        description="The reward falls by up to 1 over the last tokens, so many, of the longest answer (DAPO);"
        " 0: it does not.",
    )
    mask_truncated_completions: bool = Field(
        default=False, description="Leave answers that reached the longest length out of the loss."
    )
    max_failed: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Share of a step's answers that a reward may fail to judge; more end the run.",
    )
    max_flat_steps: Count = Field(
        default=50, description="Steps in a row without a group to learn from, which end the run."
    )
    warm_start_steps: CountOrZero = Field(
        default=0, description="Updates of SFT on the rows' own answers, before the first rollout."
    )

    @property
    def answers_per_step(self) -> int:
        """The answers of one step, before any is left out."""
        return self.prompts_per_step * self.num_generations

    @property
    def loss_temperature(self) -> float:
        """The number that divides the logits in the loss."""
        return self.loss.temperature or self.rollout.temperature

    @property
    def divisor_per_answer(self) -> float | None:
        """The number that each answer adds to the divisor of an update; None where the loss is a mean."""
        if self.loss.mean != "constant":
            return None
        return self.loss.divisor or self.rollout.max_completion_length
