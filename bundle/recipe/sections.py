"""The other sections of a recipe: devices, data, training, optimizer, distribution, checkpoints, metrics."""

from typing import Literal

from bundle.recipe.section import Count, CountOrZero, Names, NotNegative, Pair, Positive, key, section

# 256 bytes, end of text, padding.
BYTE_VOCABULARY = 258

# Beyond any machine, and small enough that a slip of the finger is refused rather than worked on.
MOST_RANKS = 2**20
MOST_PER_NODE = 1024


@section
class Devices:
    """How many devices the job takes."""

    nodes: Count = key(default=1, description="Machines.")
    per_node: Count | None = key(
        default=None,
        le=MOST_PER_NODE,
        description="Devices of each machine; null: all it has (cpu: the smallest world that fits).",
    )


@section
class Fields:
    """Names of the fields of a JSONL or parquet row."""

    text: str = key(default="text", description="Pre-training: the document.")
    prompt: str = key(default="prompt", description="SFT: what the model is given.")
    response: str = key(default="response", description="SFT: what it should answer; only this has a loss.")
    messages: str = key(
        default="messages", description="SFT: a list of {role, content}; taken where a row has it."
    )


@section
class Data:
    """What is trained on."""

    source: Literal["text", "jsonl", "parquet"] = key(description="Kind of the files.")
    path: Names = key(
        min_length=1,
        description="Files, directories, globs, or `stdlib`: the running Python's standard library.",
    )
    separator: str | None = key(
        default=None,
        min_length=1,
        description="text: divides a file into documents, such as a blank line; null: a file is a document.",
    )
    tokenizer: str = key(
        pattern=r"^(bytes|hf:.+)$",
        default="bytes",
        description="`bytes` (256 and two specials), or `hf:DIR`, a local Hugging Face tokenizer.",
    )
    sequence_length: Count = key(description="Tokens of a sample; packed: tokens of a pack.")
    packed: bool = key(
        default=False, description="Pack whole documents into each sample, without attention across."
    )
    validation: float = key(
        default=0.02, ge=0, lt=1, description="Share of the documents held out for evaluation; 0: none."
    )
    on_error: Literal["stop", "skip"] = key(
        default="stop", description="Corrupt rows and files: stop and list them, or skip and count them."
    )
    fields: Fields = key(default_factory=Fields, description="Names of the fields of a row.")
    template: Literal["plain", "chat"] = key(
        default="plain", description="SFT: roles as plain headings, or the tokenizer's own chat template."
    )
    learn: Literal["all_turns", "last_turn"] = key(
        default="all_turns",
        description="SFT: learn what the assistant says in every turn, or in the last one only, as templates"
        " need that write earlier turns without thoughts.",
    )


@section
class Train:
    """How long and in which portions."""

    steps: Count = key(
        description="Optimizer steps. --resume takes more of them, with the schedule of the new length."
    )
    micro_batch_size: Count = key(default=1, description="Samples of one forward pass on one rank.")
    global_batch_size: Count = key(description="Samples of one optimizer step over all ranks.")
    eval_interval: CountOrZero = key(
        default=100, description="Steps between evaluations; 0: only at the end."
    )
    eval_batches: Count = key(default=8, description="Global batches of one evaluation.")
    log_interval: Count = key(default=10, description="Steps between reports.")
    loss_mean: Literal["token", "sequence"] = key(
        default="token",
        description=(
            "What counts alike in the loss: every learned token, or every sequence. A step in which no token "
            "is learned has no gradient, of balancing losses either; the rest of its update is made: weight "
            "decay, momentum, the learning rate."
        ),
    )
    on_nan: Literal["stop", "skip"] = key(
        default="stop",
        description=(
            "A gradient that is not finite: stop, or skip that update; such a loss, as that of a report "
            "about no learned token: stop, or go on."
        ),
    )


@section
class Optimizer:
    """Adam with decoupled weight decay, its state divided between data-parallel ranks."""

    name: Literal["adam"] = key(default="adam", description="The algorithm.")
    lr: Positive = key(default=1e-3, description="Highest learning rate.")
    min_lr: NotNegative = key(default=0.0, description="Learning rate at the last step.")
    warmup_steps: CountOrZero = key(
        default=0, description="Steps until the highest learning rate, in equal parts."
    )
    schedule: Literal["cosine", "linear", "constant"] = key(
        default="cosine", description="How the learning rate falls after the warm-up."
    )
    weight_decay: NotNegative = key(default=0.1, description="Decoupled weight decay.")
    betas: Pair = key(default=(0.9, 0.95), description="Decay of the two moments.")
    eps: Positive = key(default=1e-8, description="Added to the denominator.")
    clip_grad: NotNegative = key(default=1.0, description="Largest gradient norm; 0: no clipping.")


@section
class Distributed:
    """How ranks exchange gradients and weights."""

    overlap_grad_reduce: bool = key(default=False, description="Reduce gradients during the backward pass.")
    overlap_param_gather: bool = key(default=False, description="Gather weights during the forward pass.")
    bucket_size: Count | None = key(
        default=None, description="Parameters per bucket of the reduction; null: megatron-core's choice."
    )
    timeout_seconds: Count = key(
        default=600, description="A collective that takes longer is a hang (exit code 6)."
    )


@section
class Checkpoint:
    """When to save, and how much to keep."""

    interval: CountOrZero = key(default=100, description="Steps between checkpoints; 0: only at the end.")
    keep: Count = key(default=2, description="Newest checkpoints that stay.")
    async_: bool = key(
        default=False, alias="async", description="Write in the background while training goes on."
    )


@section
class Metrics:
    """Where numbers go besides metrics.jsonl and the terminal."""

    tensorboard: bool = key(default=True, description="Write TensorBoard event files.")
