"""The entries of the catalogue (patches, seams, traps), and the decision about each.

The module also has the features: words for what a job uses. A recipe tells its own in `Recipe.features`.
"""

from collections.abc import Callable, Iterable
from enum import StrEnum
from itertools import chain
from typing import NamedTuple

from bundle.environment import BACKENDS
from bundle.errors import UsageError, find_nearest, format_suggestion
from bundle.patches.definitions import Definition, EvidenceDefinitions

LOCAL_LAYER_BACKENDS = (
    "cpu",
    "ascend",
)  # backends whose layers are megatron's own, without Transformer Engine
NO_CALLER_ASSUMPTION = "nothing"  # Patch.assumes of a patch that is right whatever its caller does
# Features that no recipe has: our engine does these itself, megatron does them in the jobs of others.
MEGATRONS_BALANCING, MEGATRONS_MTP_LOSS = "megatron-balancing", "megatron-mtp-loss"
MEGATRON_TIED_HEAD_FEATURE = "megatron-tied-head"
EXTERNAL_PROGRAM_FEATURES = frozenset({MEGATRONS_BALANCING, MEGATRONS_MTP_LOSS, MEGATRON_TIED_HEAD_FEATURE})

# Features of every job on accelerators, which nobody names. In the jobs of others losses are megatron's.
IMPLICIT_EXTERNAL_FEATURES = (
    frozenset({"attention-flash", "bf16", "distributed-checkpoint"}) | EXTERNAL_PROGRAM_FEATURES
)

# word -> its meaning for a job
FEATURES: dict[str, str] = {
    "all-experts-on-each-rank": "experts that are not divided between ranks",
    "attention-flash": "core attention by a flash kernel",
    "attention-sinks": "learned attention sinks (softmax_type: learnable), as in gpt-oss",
    "batched-exchange": "pipeline stages exchange in batches (batch_p2p_comm)",
    "bf16": "computes in bfloat16",
    "cp": "context parallelism above 1",
    "cross-attention": "cross attention, as in T5",
    "distributed-checkpoint": "megatron's distributed checkpoints",
    "dp-reshardable": "optimizer checkpoints by buckets (dp_reshardable)",
    "ep": "expert parallelism above 1",
    "etp-unlike-tp": "experts cut into more or fewer parts than other weights",
    "expert-bias": "routers with an expert bias (moe_router_enable_expert_bias)",
    "explicit-groups": "process groups given to modules (pg_collection), other than those of the layout",
    "fp8": "FP8 training",
    "gated-delta-net": "gated delta net layers (Qwen3-Next, Qwen3.5)",
    "gathered-logits": "the model gathers its logits (parallel_output=False)",
    "global-aux-loss": "the balancing loss global_aux_loss",
    "gqa": "fewer groups of keys than heads",
    "label-smoothing": "label smoothing",
    "llava": "megatron's LLaVAModel",
    "lora": "low-rank adapters (LoRA), or other training beside frozen weights",
    "megatron-balancing": "megatron's own balancing losses",
    "megatron-fsdp": "Megatron-FSDP",
    "megatron-mtp-loss": "megatron's own loss of multi-token prediction",
    "megatron-tied-head": "megatron's own weight for a tied head behind the first stage",
    "mla": "multi-latent attention",
    "moe": "mixture of experts",
    "mrope": "multimodal rotary positions (mrope)",
    "mtp": "multi-token prediction",
    "multimodal": "embeddings of images or other media among those of the text",
    "mxfp8-param-gather": "weights gathered in MXFP8",
    "optimizer-cpu-offload": "the optimizer on the host (optimizer_cpu_offload)",
    "optimizer-default-sharding": "optimizer checkpoints saved without a choice of their sharding",
    "output-gate": "attention with an output gate (Qwen3-Next, Qwen3.5)",
    "overlap-grad-reduce": "gradients reduced during the backward pass",
    "overlap-param-gather": "weights gathered during the forward pass",
    "packed": "several sequences in one row (thd, cu_seqlens)",
    "padding": "rows of padding in micro-batches",
    "padding-mask": "a padding mask given to the model",
    "per-token-loss": "a loss per token (calculate_per_token_loss)",
    "pp": "pipeline parallelism above 1",
    "recompute-full": "full recomputation of activations",
    "resume-other-layout": "resumed with another layout",
    "router-replay": "routers that replay recorded experts",
    "seq-aux-loss": "the balancing loss seq_aux_loss",
    "sp": "sequence parallelism",
    "tied-embeddings": "embedding and output layer share their weight",
    "tp": "tensor parallelism above 1",
    "unequal-head-dims": "values of another width than queries",
    "vpp": "an interleaved pipeline",
}


def parse_job_features_or_all(raw_words: Iterable[str]) -> frozenset[str] | None:
    """Return the words and the features that every job has; None, for all features, where there are no words.

    Raises UsageError for words that no patch and no trap asks for.
    """
    words = parse_features(raw_words)
    return frozenset(words) | IMPLICIT_EXTERNAL_FEATURES if words else None


def parse_features(raw_words: Iterable[str]) -> tuple[str, ...]:
    """Return the words as they are spelled here. Raises UsageError as `parse_job_features_or_all` does."""
    words = tuple(word.strip().lower() for word in raw_words if word.strip())
    unknown = [
        f"{word[:100]}{format_suggestion(find_nearest(word, FEATURES))}"
        for word in words
        if word not in FEATURES
    ]
    if unknown:
        raise UsageError(f"unknown features (known: {', '.join(sorted(FEATURES))}):", unknown)
    return words


def format_non_implicit_features(words: Iterable[str]) -> str:
    """Return the words for a sentence ("cp and mtp"), without the features that every job has."""
    return " and ".join(sorted(set(words) - IMPLICIT_EXTERNAL_FEATURES))


class Presence(StrEnum):
    """The answer of the source about a defect. It is UNKNOWN when the code looks like neither state."""

    PRESENT = "present"
    ABSENT = "absent"
    UNKNOWN = "unknown"

    @classmethod
    def from_bool(cls, present: bool) -> "Presence":
        """Return PRESENT for True and ABSENT for False."""
        return cls.PRESENT if present else cls.ABSENT

    @classmethod
    def from_matches(cls, present: object = False, absent: object = False) -> "Presence":
        """Return PRESENT where wrong code was recognised, else ABSENT where right code was, else UNKNOWN."""
        return cls.PRESENT if present else cls.ABSENT if absent else cls.UNKNOWN


class DefectKind(StrEnum):
    """The way in which a user meets a defect."""

    SILENT = "silent"  # other numbers, or code of others that runs: no error and no hang
    ERROR = "error"  # an error or a hang
    SLOW = "slow"  # time or memory, with the right numbers


class DefectCheck(NamedTuple):
    """A check whether a source has a defect, and the definitions that it reads."""

    evidence: tuple[str, ...]
    detect: Callable[[EvidenceDefinitions], Presence]

    def __call__(self, source: EvidenceDefinitions) -> Presence:
        """Return what the source says. Raises source.UnreadableSource."""
        return self.detect(source)


def detect_in_source(*evidence: str) -> Callable[[Callable[[EvidenceDefinitions], Presence]], DefectCheck]:
    """Return a decorator that makes a DefectCheck of a function of the source."""
    return lambda detect: DefectCheck(evidence, detect)


def detect_in_definitions(
    *targets: str | tuple[str, ...],
    optional: tuple[str | tuple[str, ...], ...] = (),
    required_module: str | None = None,
) -> Callable[[Callable[..., Presence]], DefectCheck]:
    """Return a decorator that makes a DefectCheck of a function of definitions.

    The function gets the definitions of `targets`, then those of `optional`, or None for each that is
    missing. A tuple stands for the first of its names that exists, since code moves. The answer is UNKNOWN
    where one of `targets` is missing, and ABSENT where the module `required_module` is missing.
    """

    def build_check(function: Callable[..., Presence]) -> DefectCheck:
        def detect(source: EvidenceDefinitions) -> Presence:
            if required_module is not None and not source.has_module(required_module):
                return Presence.ABSENT
            definitions = [_find_first(target, source) for target in targets]
            if None in definitions:
                return Presence.UNKNOWN
            return function(*definitions, *(_find_first(target, source) for target in optional))

        groups = ((target,) if isinstance(target, str) else target for target in (*targets, *optional))
        return DefectCheck(tuple(chain.from_iterable(groups)), detect)

    return build_check


def _find_first(target: str | tuple[str, ...], source: EvidenceDefinitions) -> Definition | None:
    if isinstance(target, str):
        return source[target]
    return next(iter(source.find_existing(*target)), None)


class Replacement(NamedTuple):
    """One attribute of megatron and the function that makes its replacement.

    `target` is "package.module:Qualified.name"; naming a re-export replaces that one namespace only.
    `function` is the "area:name" of a function in bundle.replacements: `name(original) -> replacement`.
    """

    target: str
    function: str
    optional: bool = False  # some of the releases do not have this target: replaced where it is
    exclusive: bool = False  # does not call the original: no other patch may stand on the target
    by_signature: bool = False  # reviewed by parameters and decorators, see `build_signature_replacement`

    @property
    def wrapper(self) -> str:
        """The wrapper function as "package.module:name"."""
        return f"bundle.replacements.{self.function}"


def build_signature_replacement(
    target: str, function: str, *, optional: bool = False, exclusive: bool = False
) -> Replacement:
    """Return a replacement that depends on the signature of its target, and not on its body."""
    return Replacement(target, function, optional, exclusive, by_signature=True)


class Patch(NamedTuple):
    """A defect of megatron-core and the replacements that mend it from outside.

    The fingerprints that were reviewed are in releases.json, under the targets' names. The wrappers were read
    and proven against the targets of those releases in which `defect` is present.
    """

    id: str
    replacements: tuple[Replacement, ...]
    why: str  # what goes wrong without it, as the user would see it
    upstream: str  # where upstream knows of it, or how it was found
    range: str  # PEP 508 on the base version of megatron-core; "" is every release
    defect: DefectCheck  # read where the defect is, which need not be in the targets
    kind: DefectKind
    # about its caller: the loss function's return values, the form of labels, the ranks of a sum
    assumes: str = ""
    when: frozenset[str] = frozenset()  # features of the recipe, all of them
    backends: tuple[str, ...] = BACKENDS
    requires: tuple[tuple[str, str], ...] = ()  # other packages and their ranges: ("torch", ">=2.8")
    opt_in: bool = False  # an improvement: applied only when it is requested by id

    @property
    def evidence_targets(self) -> tuple[str, ...]:
        """The definitions that decide whether the defect is present."""
        return self.defect.evidence


class Seam(NamedTuple):
    """A private upstream name that the bundle relies on without replacing it."""

    id: str
    targets: tuple[str, ...]
    use: str  # how it is used, and by which room
    why: str
    when: frozenset[str] = frozenset()
    range: str = ""  # the releases that have it
    by_signature: bool = False  # reviewed as a Replacement's target is


class Trap(NamedTuple):
    """A defect with no narrow fix: the recipes that meet it are refused."""

    id: str
    range: str  # PEP 508 on the base version of megatron-core; used only where no source decides
    defect: DefectCheck
    when: frozenset[str]  # features of the recipe, all of them
    why: str  # what goes wrong
    cause: str  # the upstream line, or how it was bisected
    kind: DefectKind
    instead: str  # what to change
    backends: tuple[str, ...] = BACKENDS
    unless: frozenset[str] = frozenset()  # any one of these features avoids it
    unshown: str = ""  # what a test would need, where no test shows it

    @property
    def evidence_targets(self) -> tuple[str, ...]:
        """The definitions that decide whether the defect is present."""
        return self.defect.evidence


class PatchAction(StrEnum):
    """The action for an entry. DRIFT and CONFLICT stop a job that needs the patch.

    UNVOUCHED is a patch that is left out, because nobody says that its caller is what the patch assumes.
    """

    APPLY = "APPLY"
    SKIP = "SKIP"
    DRIFT = "DRIFT"
    CONFLICT = "CONFLICT"
    OWNED = "OWNED"
    UNVOUCHED = "UNVOUCHED"
    TRAP = "TRAP"


class Decision(NamedTuple):
    """The decision about one entry. `proven` is False where only a version number decided."""

    id: str
    action: PatchAction
    reason: str
    range: str
    presence: Presence
    proven: bool
    targets: tuple[str, ...] = ()
    fingerprints: tuple[str, ...] = ()  # of those targets that are there, in their order
    assumes: str = ""  # what the patch assumes about its caller
    stops: bool = False  # the job needs this and cannot have it

    @property
    def reason_line(self) -> str:
        """The line that says what stops a job. It names the action, except for a trap."""
        return (
            f"{self.id}:"
            f" {self.reason if self.action is PatchAction.TRAP else f'{self.action}: {self.reason}'}"
        )
