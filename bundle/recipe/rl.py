"""The section of a recipe that says how a policy learns from rewards (task rl): keys, values, defaults.

Keys have TRL's names where TRL has them. `rl_rules` holds the checks.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from bundle.recipe.data import DataKind
from bundle.recipe.section import (
    AS_TUPLE,
    Count,
    CountOrZero,
    DerivedDefaultsSection,
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
DEFAULT_CLIP_BY_LOSS_KIND = {"ppo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 0.28)}
# Seconds: of one answer (math, code), and of all answers in a call (python, http).
REWARD_TIMEOUTS = {"exact": 5.0, "math": 5.0, "python": 60.0, "http": 10.0, "code": 10.0}


class RLRollout(Section):
    """How answers are sampled."""

    engine: Literal["transformers", "sglang"] = Field(
        default="transformers",
        description="What samples the answers. transformers: its model class, in the process of each rank;"
        " sglang: SGLang servers.",
    )
    temperature: Positive = Field(default=1.0, description="Divides the logits before an answer is sampled.")
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Nucleus sampling: smallest set of tokens with this total probability. Only 1 is"
        " allowed, because the loss needs the probabilities of all tokens.",
    )
    max_completion_length: Count = Field(default=256, description="Longest answer [tokens].")
    path: str | None = Field(
        default=None,
        min_length=1,
        description="Folder `rollouts` of an earlier run, to learn from its answers without sampling;"
        " null: sample.",
    )
    urls: Names = Field(
        default=(),
        description="sglang: running servers, `http://HOST:PORT`. BUNDLE_ROLLOUT_API_KEY and"
        " BUNDLE_ROLLOUT_ADMIN_KEY in the environment authenticate. []: the run starts servers.",
    )
    python: str | None = Field(
        default=None,
        min_length=1,
        description="sglang: the Python interpreter of SGLang's environment; null: that of the run.",
    )
    replicas: Count = Field(default=1, description="sglang: servers that the run starts.")
    tp: Count = Field(default=1, description="sglang: tensor parallel size of a server, in devices.")
    mem_fraction_static: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="sglang: share of a device's memory for a server's weights and cache; null: what the"
        " trainer leaves, as `plan` prints it.",
    )
    arguments: Names = Field(
        default=(), description="sglang: further arguments of each server, such as --attention-backend fa3."
    )
    weights_folder: str | None = Field(
        default=None,
        min_length=1,
        description="sglang: folder of the weights for the servers, which holds up to two versions; null:"
        " /dev/shm if it has room, else the run directory.",
    )
    transport: Literal["files", "ipc"] | None = Field(
        default=None,
        description="sglang: how servers that the run starts get weights. files: from files; ipc: from GPU"
        " memory shared with the trainer. ipc changes to files after a failed transfer or a wrong checksum."
        " null: ipc for one server on one GPU, else files.",
    )
    verify: Literal["always", "first"] = Field(
        default="always",
        description="sglang: when to compare checksums of the server's weights with the weights sent."
        " `always` becomes `first` if it takes more than 2 % of a step.",
    )
    timeout_seconds: float = Field(
        default=900.0,
        gt=0,
        le=86_400,
        description="sglang: timeout of a call to a server [s].",
    )
    stop: Names = Field(
        default=(),
        description="Texts of one token each that end an answer, in addition to the tokenizer's end of"
        " text and the template's end of turn.",
    )


class RLEvaluation(Section):
    """Questions for evaluations, which are never learned. One evaluation precedes the first step."""

    path: Names = Field(min_length=1, description="As data.path.")
    source: DataKind | None = Field(default=None, description="Kind of the files; null: data.source.")
    interval: CountOrZero = Field(default=20, description="Steps between evaluations; 0: only at the end.")
    samples: Count = Field(
        default=1,
        description="Answers per question. 1: accuracy of the greedy answer; more: pass@k of answers at"
        " rollout.temperature.",
    )


class RLReward(DerivedDefaultsSection):
    """A judge of answers; the reward of an answer is the weighted sum over all judges."""

    kind: Literal["exact", "math", "python", "http", "code"] = Field(
        description="exact: 1 if the answer is the text of the field, else 0; math: 1 for the same"
        " mathematical value, by math-verify (extra `rl`), else 0; python: a function of yours; http: a"
        " server of yours; code: the share of the row's tests that the answer's program passes."
    )
    weight: float = Field(default=1.0, description="Factor of the reward in the sum.")
    field: str | None = Field(
        default=None,
        min_length=1,
        description="exact, math: field of a row with the right answer; a.b is field b of object a. null:"
        " reward_model.ground_truth (verl) if a row has it, else data.fields.response.",
    )
    pattern: str | None = Field(
        default=None,
        min_length=1,
        description="exact, math: regular expression for the right answer in the field, such as `####"
        " (.+)`. The last match counts: its group, or the whole match. null: the whole field.",
    )
    function: str | None = Field(
        default=None,
        min_length=1,
        description="python: `FILE.py:NAME`, a function of (answers: list[str], rows: list[dict]) that"
        " returns a list with a number or None per answer. None: the answer cannot be judged, and is not"
        " trained on.",
    )
    url: str | None = Field(
        default=None,
        min_length=1,
        description='http: address to POST {"answers": [...], "rows": [...]} to, as JSON. The response'
        ' is {"rewards": [...]}, with a number or null per answer. null: as None in `function`.',
    )
    tests: str | None = Field(
        default=None,
        min_length=1,
        description="code: field of a row with the tests: Python text, or a list of texts; a.b is field b"
        " of object a.",
    )
    memory_gib: Positive = Field(default=1.0, description="code: memory of each process of a program [GiB].")
    timeout_seconds: Positive = Field(
        default=5.0,
        json_schema_extra=add_null,
        description="Timeout [s], after which answers without a reward are left out. math: of one answer;"
        " python, http: of a call. code: of an answer's program, whose remaining tests fail. null or"
        " left out: 60 for python, 10 for http and code, else 5.",
    )
    processes: Count = Field(default=1, description="Processes on each rank that judge its answers.")

    @property
    def needs_right_answer(self) -> bool:
        """True if a row must have the right answer or tests; a reward of 1 then means a right answer."""
        return self.kind in ("exact", "math", "code")

    @classmethod
    def derive_defaults(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the default timeout of the kind of reward."""
        kind = values.get("kind")
        return {"timeout_seconds": REWARD_TIMEOUTS.get(kind, 5.0)} if isinstance(kind, str) else {}


class RLCorrection(Section):
    """Weights that correct for a rollout engine whose probabilities differ from the trainer's.

    The weight is w = exp(old - rollout); old and rollout are the log-probabilities of the trainer and of
    the rollout engine.
    """

    kind: Literal["truncate", "mask"] = Field(
        default="truncate",
        description="truncate: multiply the loss by min(w, high) (TIS); mask: multiply it by w if low <= w"
        " <= high, else by 0 (level token: IcePop; sequence: MIS).",
    )
    level: Literal["token", "sequence", "geometric"] = Field(
        default="token",
        description="Scope of w: each token, all tokens of an answer together, or their geometric mean.",
    )
    low: NotNegative = Field(default=0.0, description="mask: lowest w.")
    high: Positive = Field(default=2.0, description="Highest w.")
    veto: Positive | None = Field(
        default=None,
        description="Leave an answer out of the loss if one of its tokens has a lower w; null: no veto.",
    )


class RLLoss(DerivedDefaultsSection):
    """The loss of the policy."""

    kind: Literal["ppo", "gspo", "cispo"] = Field(
        default="ppo",
        description="What is clipped. ppo: the ratio of each token; gspo: the ratio of each answer; cispo:"
        " only the weight.",
    )
    clip: Pair = Field(
        default=DEFAULT_CLIP_BY_LOSS_KIND["ppo"],
        json_schema_extra=add_null,
        description="Distances below and above 1 at which the ratio is clipped. null or left out: [0.2,"
        " 0.28] for ppo, [0.0003, 0.0004] for gspo, [1, 0.28] for cispo.",
    )
    dual_clip: float | None = Field(
        default=None,
        gt=1,
        description="ppo, gspo: limit the loss of a negative advantage to this multiple of the advantage;"
        " null: no limit.",
    )
    entropy: NotNegative = Field(default=0.0, description="Coefficient of the entropy bonus.")
    kl: NotNegative = Field(
        default=0.0,
        description="Coefficient of the KL divergence from the reference, the model at the start of"
        " training; 0: no reference is kept.",
    )
    kl_kind: Literal["k1", "k2", "k3"] = Field(
        default="k2",
        description="Estimator of the divergence; k1 is subtracted from rewards, k2 and k3 are losses.",
    )
    mean: Literal["token", "sequence", "constant"] = Field(
        default="token",
        json_schema_extra=add_null,
        description="How the loss is averaged. token: over all tokens. sequence: over the tokens of each"
        " answer, then over the answers. constant: the sum over all tokens, divided by the number of answers"
        " and by `divisor` (Dr.GRPO). null or left out: sequence for kind gspo, token for other kinds.",
    )
    divisor: Positive | None = Field(
        default=None,
        description="For `mean: constant`: the loss is divided by this number of tokens per answer. null:"
        " rollout.max_completion_length.",
    )
    temperature: Positive | None = Field(
        default=None, description="Divides the logits in the loss; null: rollout.temperature."
    )
    correction: RLCorrection | None = Field(
        default=None, description="Correct for the rollout engine's probabilities; null: no correction."
    )

    @classmethod
    def derive_defaults(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the default bounds and mean of the kind of loss."""
        kind = values.get("kind", "ppo")
        if not isinstance(kind, str):
            return {}
        return {
            "clip": DEFAULT_CLIP_BY_LOSS_KIND.get(kind, DEFAULT_CLIP_BY_LOSS_KIND["ppo"]),
            "mean": "sequence" if kind == "gspo" else "token",
        }


class RL(Section):
    """Reinforcement learning from rewards, for task rl. A step has questions, answers and updates."""

    prompts_per_step: Count = Field(description="Questions of one step.")
    num_generations: Count = Field(description="Answers to each question, 2 or more. They form a group.")
    num_iterations: Count = Field(
        default=1,
        description="Passes over all answers of a step, in updates of train.global_batch_size.",
    )
    rollout: RLRollout = make_default_section("How answers are sampled.")
    evaluation: RLEvaluation | None = Field(default=None, description="Questions to evaluate with.")
    rewards: Annotated[tuple[RLReward, ...], AS_TUPLE] = Field(
        description="Rewards that judge the answers, a list of at least one."
    )
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"] = (
        Field(default="grpo", description="How rewards become advantages.")
    )
    discount: float = Field(
        default=1.0, gt=0, le=1, description="reinforce_plus_plus: discount factor of later tokens' rewards."
    )
    loss: RLLoss = make_default_section("The loss of the policy.")
    old_log_probs: Literal["rollout", "trainer"] = Field(
        default="rollout",
        description="Source of the old log-probabilities in the ratio: the rollout engine, or the trainer,"
        " which computes them again.",
    )
    dynamic_sampling: CountOrZero = Field(
        default=0,
        description="Maximum number of extra sampling rounds per step. Each replaces groups with equal"
        " rewards by groups of new questions (DAPO). 0: no extra round.",
    )
    overlong_buffer: CountOrZero = Field(
        default=0,
        description="Number of tokens before rollout.max_completion_length over which the reward falls"
        " linearly by up to 1 (DAPO). 0: no such penalty.",
    )
    mask_truncated_completions: bool = Field(
        default=False, description="Leave answers that reached the longest length out of the loss."
    )
    max_failed: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Largest share of a step's answers that a reward may fail to judge before the run ends.",
    )
    max_flat_steps: Count = Field(
        default=50, description="Steps in a row without a group to learn from before the run ends."
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
