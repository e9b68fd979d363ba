"""Defaults of keys by the kind of training: values of published recipes, each with its source.

Most kinds train published weights. Other training of random weights, such as SFT, keeps the defaults of the
schema.
"""

from typing import Any, NamedTuple

SFT, LORA_SFT = "full SFT", "LoRA SFT"
DPO, LORA_DPO = "full DPO", "LoRA DPO"
RL, LORA_RL = "full RL", "LoRA RL"
CONTINUED, LORA_CONTINUED = "continued pre-training", "LoRA continued pre-training"
PRETRAINING_KIND = "pre-training"
# By task, and whether adapters are trained.
KIND_BY_TASK_AND_LORA = {
    ("sft", False): SFT,
    ("sft", True): LORA_SFT,
    ("dpo", False): DPO,
    ("dpo", True): LORA_DPO,
    ("rl", False): RL,
    ("rl", True): LORA_RL,
    ("pretrain", False): CONTINUED,
    ("pretrain", True): LORA_CONTINUED,
}
# Smaller models that begin with random weights keep the defaults of the schema, such as lr 1e-3.
LEAST_PRETRAINING_PARAMETERS = 1e8  # parameters


class Default(NamedTuple):
    """The value of a key that a recipe leaves out, and the source that published the value.

    `by_size` has values for larger models: the least number of parameters, and the value from there on.
    """

    key: str
    value: Any
    source: str
    by_size: tuple[tuple[float, Any], ...] = ()

    def choose(self, parameters: float) -> Any:
        """Return the value for a model of this size."""
        reached = [value for least, value in self.by_size if parameters >= least]
        return reached[-1] if reached else self.value


# The name of the lowest learning rate as a share of the highest.
MIN_LR_RATIO_PSEUDO_KEY = "optimizer.min_lr / optimizer.lr"

# The key for models whose routers have a steering bias.
BIAS_UPDATE_RATE_KEY = "model.moe.bias_update_rate"

_SWIFT_ARGUMENTS_SOURCE = "ms-swift swift/megatron/arguments/megatron_args.py"
_SWIFT_SFT_SOURCE = "ms-swift examples/megatron/sft.sh"
_SWIFT_PACKED_SOURCE = "ms-swift examples/megatron/dense/qwen3_32b.sh"
_SWIFT_LORA_SOURCE = "ms-swift examples/megatron/lora/dense.sh"
_SWIFT_DPO_SOURCE = "ms-swift examples/megatron/rlhf/dpo/packing.sh"
_SWIFT_PRETRAIN_SOURCE = "ms-swift examples/megatron/pretrain.sh"
_SWIFT_GRPO_SOURCE = "ms-swift examples/megatron/grpo/dense_colocate.sh"
_SWIFT_LORA_GRPO_SOURCE = "ms-swift examples/megatron/grpo/moe_colocate_lora.sh"
_SLIME_SOURCE = "slime scripts/run-qwen3-4B.sh"
_TULU_CITATION = "open-instruct docs/tulu3.md"
_ZEPHYR_SOURCE = "alignment-handbook recipes/zephyr-7b-beta/dpo/config_full.yaml"
_ZEPHYR_LORA_SOURCE = "alignment-handbook recipes/zephyr-7b-beta/dpo/config_qlora.yaml"
_PADDLE_SFT_SOURCE = "PaddleNLP llm/run_finetune.py (PaddleNLP#11072)"
_PADDLE_DPO_SOURCE = "PaddleFormers paddleformers/cli/train/dpo/workflow.py"
_HF_TRAINING_ARGUMENTS_SOURCE = "transformers TrainingArguments"
_MEGATRON_DEEPSPEED_GPT_SOURCE = (
    "Megatron-DeepSpeed (a fork of Megatron-LM) examples/MoE/ds_pretrain_gpt_1.3B_dense.sh (GPT-3's values)"
)
_MEGATRON_LLAMA_SOURCE = "Megatron-LM examples/llama/train_llama3_8b_h100_fp8.sh"
_TRL_MODEL_SOURCE = "TRL trl/trainer/model_config.py"
# By the number of parameters.
_GPT3_LR = (
    (3.5e8, 3e-4),
    (7.6e8, 2.5e-4),
    (1.3e9, 2e-4),
    (2.7e9, 1.6e-4),
    (6.7e9, 1.2e-4),
    (1.3e10, 1e-4),
    (1.75e11, 6e-5),
)

# Defaults of adapters for every task.
LORA_DEFAULTS = (
    Default("model.lora.rank", 16, _TRL_MODEL_SOURCE),
    Default("model.lora.alpha", 32.0, _TRL_MODEL_SOURCE),
    Default("model.lora.dropout", 0.0, "PEFT LoraConfig"),
    Default("model.lora.targets", ("all-linear",), _SWIFT_LORA_SOURCE),
)

_SWIFT_OPTIMIZER_DEFAULTS = (
    Default("optimizer.weight_decay", 0.1, _SWIFT_ARGUMENTS_SOURCE),
    Default("optimizer.betas", (0.9, 0.95), _SWIFT_ARGUMENTS_SOURCE),
    Default("optimizer.clip_grad", 1.0, _SWIFT_ARGUMENTS_SOURCE),
    Default("optimizer.schedule", "cosine", _SWIFT_ARGUMENTS_SOURCE),
)
_DPO_OPTIMIZER = (
    Default("optimizer.warmup_ratio", 0.1, _ZEPHYR_SOURCE),
    Default(MIN_LR_RATIO_PSEUDO_KEY, 0.0, _ZEPHYR_SOURCE),
    Default("optimizer.weight_decay", 0.0, _TULU_CITATION),
    Default("optimizer.betas", (0.9, 0.999), _HF_TRAINING_ARGUMENTS_SOURCE),
    Default("optimizer.clip_grad", 1.0, _HF_TRAINING_ARGUMENTS_SOURCE),
    Default("optimizer.schedule", "cosine", _ZEPHYR_SOURCE),
)
_RL_OPTIMIZER = (
    Default("optimizer.warmup_ratio", 0.0, f"{_SLIME_SOURCE} (names none)"),
    Default("optimizer.weight_decay", 0.1, _SLIME_SOURCE),
    Default("optimizer.betas", (0.9, 0.98), _SLIME_SOURCE),
    Default("optimizer.clip_grad", 1.0, _SWIFT_ARGUMENTS_SOURCE),
    Default("optimizer.schedule", "constant", _SLIME_SOURCE),
)
_FULL_MODEL_EXPORT = Default("checkpoint.export", "hf", _SWIFT_SFT_SOURCE)
_ADAPTER_EXPORT_DEFAULT = Default("checkpoint.export", "peft", _SWIFT_LORA_SOURCE)

DEFAULTS_BY_TRAINING_KIND: dict[str, tuple[Default, ...]] = {
    SFT: (
        Default("model.dtype", "bf16", _TULU_CITATION),
        Default("data.packed", True, _SWIFT_PACKED_SOURCE),
        Default("optimizer.lr", 1e-5, _SWIFT_ARGUMENTS_SOURCE),
        Default(MIN_LR_RATIO_PSEUDO_KEY, 0.1, _SWIFT_SFT_SOURCE),
        Default("optimizer.warmup_ratio", 0.05, _SWIFT_SFT_SOURCE),
        *_SWIFT_OPTIMIZER_DEFAULTS,
        _FULL_MODEL_EXPORT,
        Default(BIAS_UPDATE_RATE_KEY, 0.0, _PADDLE_SFT_SOURCE),
    ),
    LORA_SFT: (
        Default("model.dtype", "bf16", _TULU_CITATION),
        Default("data.packed", True, _SWIFT_PACKED_SOURCE),
        Default("optimizer.lr", 1e-4, _SWIFT_ARGUMENTS_SOURCE),
        Default(MIN_LR_RATIO_PSEUDO_KEY, 0.1, _SWIFT_LORA_SOURCE),
        Default("optimizer.warmup_ratio", 0.05, _SWIFT_LORA_SOURCE),
        *_SWIFT_OPTIMIZER_DEFAULTS,
        _ADAPTER_EXPORT_DEFAULT,
    ),
    DPO: (
        Default("model.dtype", "bf16", _ZEPHYR_SOURCE),
        Default("data.packed", True, _SWIFT_DPO_SOURCE),
        Default("optimizer.lr", 5e-7, f"{_ZEPHYR_SOURCE}; {_TULU_CITATION} from 70B on", ((60e9, 2e-7),)),
        *_DPO_OPTIMIZER,
        _FULL_MODEL_EXPORT,
        Default(BIAS_UPDATE_RATE_KEY, 0.0, _PADDLE_DPO_SOURCE),
    ),
    LORA_DPO: (
        Default("model.dtype", "bf16", _ZEPHYR_LORA_SOURCE),
        Default("data.packed", True, _SWIFT_DPO_SOURCE),
        Default("optimizer.lr", 5e-6, _ZEPHYR_LORA_SOURCE),
        *_DPO_OPTIMIZER,
        _ADAPTER_EXPORT_DEFAULT,
    ),
    RL: (
        Default("model.dtype", "bf16", _SWIFT_GRPO_SOURCE),
        Default("data.packed", True, _SWIFT_GRPO_SOURCE),
        Default("optimizer.lr", 1e-6, _SLIME_SOURCE),
        *_RL_OPTIMIZER,
        _FULL_MODEL_EXPORT,
        Default(BIAS_UPDATE_RATE_KEY, 0.0, _PADDLE_DPO_SOURCE),
    ),
    LORA_RL: (
        Default("model.dtype", "bf16", _SWIFT_LORA_GRPO_SOURCE),
        Default("data.packed", True, _SWIFT_LORA_GRPO_SOURCE),
        Default("optimizer.lr", 5e-5, _SWIFT_LORA_GRPO_SOURCE),
        *_RL_OPTIMIZER,
        _ADAPTER_EXPORT_DEFAULT,
    ),
    CONTINUED: (
        Default("model.dtype", "bf16", _MEGATRON_LLAMA_SOURCE),
        Default("data.packed", False, _MEGATRON_LLAMA_SOURCE),
        Default("optimizer.lr", 1e-5, _SWIFT_PRETRAIN_SOURCE),
        Default(MIN_LR_RATIO_PSEUDO_KEY, 0.1, _SWIFT_PRETRAIN_SOURCE),
        Default("optimizer.warmup_ratio", 0.03, _SWIFT_PRETRAIN_SOURCE),
        *_SWIFT_OPTIMIZER_DEFAULTS,
        Default("checkpoint.export", "hf", _SWIFT_PRETRAIN_SOURCE),
    ),
    LORA_CONTINUED: (
        Default("model.dtype", "bf16", _MEGATRON_LLAMA_SOURCE),
        Default("data.packed", False, _MEGATRON_LLAMA_SOURCE),
        Default("optimizer.lr", 1e-4, _SWIFT_ARGUMENTS_SOURCE),
        Default(MIN_LR_RATIO_PSEUDO_KEY, 0.1, _SWIFT_LORA_SOURCE),
        Default("optimizer.warmup_ratio", 0.05, _SWIFT_LORA_SOURCE),
        *_SWIFT_OPTIMIZER_DEFAULTS,
        _ADAPTER_EXPORT_DEFAULT,
    ),
    PRETRAINING_KIND: (
        Default("model.dtype", "bf16", _MEGATRON_LLAMA_SOURCE),
        Default("data.packed", False, _MEGATRON_LLAMA_SOURCE),
        Default("optimizer.lr", 6e-4, _MEGATRON_DEEPSPEED_GPT_SOURCE, _GPT3_LR),
        Default(MIN_LR_RATIO_PSEUDO_KEY, 0.1, _MEGATRON_DEEPSPEED_GPT_SOURCE),
        Default("optimizer.warmup_ratio", 0.00125, _MEGATRON_DEEPSPEED_GPT_SOURCE),
        Default("optimizer.weight_decay", 0.1, _MEGATRON_DEEPSPEED_GPT_SOURCE),
        Default("optimizer.betas", (0.9, 0.95), _MEGATRON_DEEPSPEED_GPT_SOURCE),
        Default("optimizer.clip_grad", 1.0, _MEGATRON_DEEPSPEED_GPT_SOURCE),
        Default("optimizer.schedule", "cosine", _MEGATRON_DEEPSPEED_GPT_SOURCE),
    ),
}
