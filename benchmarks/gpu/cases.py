"""What is run, as data: recipes with overrides, how many steps on which backend."""

from dataclasses import dataclass
from pathlib import Path

from bundle.planning import Plan, build_plan
from bundle.recipe import Recipe, load

_HERE = Path(__file__).parent
_SHORT = (
    "train.steps=60",
    "data.validation=0",
    "optimizer={lr: 1.5e-3, min_lr: 1.5e-4, warmup_steps: 10}",
)
_DEMO = ("parallel.ep=1", *_SHORT)
_QWEN = ("parallel.cp=1", *_SHORT)
_BF16 = ("model.dtype=bf16",)
_PACKED = (
    "data.packed=true",
    'data.separator="\n\n\n"',
    "data.sequence_length=2048",
    "model.config.max_position_embeddings=2048",
    "train.micro_batch_size=1",
    "train.global_batch_size=2",
)
# Optimizers whose state every rank has whole.
_UNDIVIDED = ("optimizer.use_distributed_optimizer=false",)
_SGD = ("optimizer.name=sgd", "optimizer.sgd_momentum=0.9", "optimizer.lr=0.05")
_AWARE = ("optimizer.use_precision_aware_optimizer=true",)
_TYPED = (*_AWARE, "optimizer.exp_avg_dtype=bf16", "optimizer.exp_avg_sq_dtype=bf16")
# Beside every projection, and so large that a few steps of the adapters are seen in the loss.
_ADAPTERS = "rank: 8, alpha: 64, targets: [o_proj, gate_proj, up_proj, down_proj"
_LORA = (f"model.lora={{{_ADAPTERS}, q_proj, k_proj, v_proj]}}",)
_LORA_LATENT = (f"model.lora={{{_ADAPTERS}, q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj]}}",)
_OFFLOADED = (*_AWARE, "optimizer.optimizer_cpu_offload=true")
# Drawn wide, so that attention is sharp from the first step and the loss feels a wrong position.
_YARN = (
    "model.config.initializer_range=0.1",
    "model.config.rope_scaling={type: yarn, factor: 4, original_max_position_embeddings: 64,"
    " mscale: 1.0, mscale_all_dim: 1.0}",
)
# So heavy that most of the gradient is of the losses that balance experts, over each sequence.
_BALANCED = (
    "model.config.seq_aux=true",
    "model.moe={aux_loss_coeff: 20, z_loss_coeff: 1}",
)


@dataclass(frozen=True)
class Case:
    """One model trained for a while: `cuda` and `cpu` are the steps of each backend, 0 for none."""

    name: str
    base: str
    overrides: tuple[str, ...]
    cuda: int
    cpu: int = 0
    gpus: int = 1
    # The control: layers are never told that a step begins, and keep the FP8 copies of the first weights.
    keeps_first_weights: bool = False
    # Variables of its plan that the ranks are started without.
    without: tuple[str, ...] = ()

    def named(self, backend: str) -> str:
        """What its run on `backend` is called."""
        return self.name if backend == "cuda" else f"{self.name} on {backend}"

    def recipe(self, backend: str) -> Recipe:
        """What is trained on `backend`: the recipe `base` with the overrides."""
        return load(self.base, (*self.overrides, f"backend={backend}"))

    @property
    def environment(self) -> dict[str, str]:
        """What the backend's own variables lack: fp32 that is fp32, where the libraries would take TF32."""
        return {"NVIDIA_TF32_OVERRIDE": "0"} if self.name.startswith("fp32") else {}

    def steps(self, backend: str) -> int:
        """How many steps are taken on `backend`."""
        return self.cuda if backend == "cuda" else self.cpu


def plan_of(case: Case, backend: str) -> Plan:
    """The plan of a case on this machine. Raises what says that it cannot run here."""
    made = build_plan(case.recipe(backend), per_node=case.gpus)
    made.raise_gravest_problem()
    return made


def _fp8(scaling: str) -> tuple[str, ...]:
    return (*_BF16, f"model.fp8.scaling={scaling}")


def _shared(name: str, *overrides: str) -> Case:
    return Case(name, "demo", (*_DEMO, *overrides), cuda=5, gpus=2)


CURVES = (
    Case("fp32", "demo", _DEMO, cuda=10, cpu=5),
    Case("bf16", "demo", (*_DEMO, *_BF16), cuda=60, cpu=5),
    Case("fp32 undivided", "demo", (*_DEMO, *_UNDIVIDED), cuda=10),
    Case("fp32 sgd", "demo", (*_DEMO, *_SGD), cuda=5, cpu=5),
    Case("bf16 undivided", "demo", (*_DEMO, *_BF16, *_UNDIVIDED), cuda=5),
    Case("bf16 sgd", "demo", (*_DEMO, *_BF16, *_SGD), cuda=5, cpu=5),
    Case("bf16 precision-aware", "demo", (*_DEMO, *_BF16, *_AWARE), cuda=60),
    Case("bf16 moments", "demo", (*_DEMO, *_BF16, *_TYPED), cuda=60),
    Case("bf16 offloaded", "demo", (*_DEMO, *_BF16, *_OFFLOADED), cuda=60),
    Case(
        "bf16 half offloaded",
        "demo",
        (*_DEMO, *_BF16, *_OFFLOADED, "optimizer.optimizer_offload_fraction=0.5"),
        cuda=60,
    ),
    Case("fp32 lora", "demo", (*_DEMO, *_LORA_LATENT), cuda=5, cpu=5),
    Case("bf16 lora", "demo", (*_DEMO, *_BF16, *_LORA_LATENT), cuda=5, cpu=5),
    Case("fp32 gqa lora", "qwen3-cp2-packed", (*_QWEN, *_LORA), cuda=5, cpu=5),
    Case("bf16 packed", "demo", (*_DEMO, *_BF16, *_PACKED), cuda=60, cpu=5),
    Case("fp32 yarn", "demo", (*_DEMO, *_YARN), cuda=2, cpu=2),
    Case("fp32 yarn packed", "demo", (*_DEMO, *_YARN, *_PACKED), cuda=2, cpu=2),
    Case("fp32 balanced", "demo", (*_DEMO, *_BALANCED), cuda=2, cpu=2),
    Case("fp32 balanced packed", "demo", (*_DEMO, *_BALANCED, *_PACKED), cuda=2, cpu=2),
    Case("bf16 balanced", "demo", (*_DEMO, *_BALANCED, *_BF16), cuda=2, cpu=2),
    Case("bf16 balanced packed", "demo", (*_DEMO, *_BALANCED, *_BF16, *_PACKED), cuda=2),
    Case("fp32 gqa", "qwen3-cp2-packed", _QWEN, cuda=5, cpu=5),
    Case("bf16 gqa", "qwen3-cp2-packed", (*_QWEN, *_BF16), cuda=60, cpu=5),
    Case("delayed", "demo", (*_DEMO, *_fp8("delayed")), cuda=60, cpu=5),
    Case("tensorwise", "demo", (*_DEMO, *_fp8("tensorwise")), cuda=60, cpu=5),
    Case("blockwise", "demo", (*_DEMO, *_fp8("blockwise")), cuda=60, cpu=5),
    Case("tensorwise lora", "demo", (*_DEMO, *_fp8("tensorwise"), *_LORA_LATENT), cuda=5, cpu=5),
    Case("blockwise packed", "demo", (*_DEMO, *_fp8("blockwise"), *_PACKED), cuda=60),
    Case("blockwise gqa", "qwen3-cp2-packed", (*_QWEN, *_fp8("blockwise")), cuda=60),
    Case(
        "blockwise, first weights kept",
        "demo",
        (*_DEMO, *_fp8("blockwise")),
        cuda=60,
        keeps_first_weights=True,
    ),
)

LAYOUTS = (
    _shared("fp32 tp2", "parallel.tp=2"),
    _shared("fp32 tp2 etp1 ep2", "parallel.tp=2", "parallel.etp=1", "parallel.ep=2"),
    _shared("fp32 ep2", "parallel.ep=2"),
    _shared("fp32 pp2", "parallel.pp=2"),
    _shared("fp32 lora tp2", "parallel.tp=2", *_LORA_LATENT),
    _shared("fp32 lora tp2 etp1 ep2", "parallel.tp=2", "parallel.etp=1", "parallel.ep=2", *_LORA_LATENT),
    _shared("fp32 lora ep2", "parallel.ep=2", *_LORA_LATENT),
    _shared("fp32 lora pp2", "parallel.pp=2", *_LORA_LATENT),
    _shared("bf16 cp2", "parallel.cp=2", *_BF16),
    _shared("bf16 packed cp2", "parallel.cp=2", *_BF16, *_PACKED),
    _shared("fp32 balanced tp2", "parallel.tp=2", *_BALANCED),
    _shared("fp32 balanced packed tp2", "parallel.tp=2", *_BALANCED, *_PACKED),
    _shared("bf16 balanced cp2", "parallel.cp=2", *_BALANCED, *_BF16),
    _shared("bf16 balanced packed cp2", "parallel.cp=2", *_BALANCED, *_BF16, *_PACKED),
    _shared("blockwise tp2 etp1 ep2", "parallel.tp=2", "parallel.etp=1", "parallel.ep=2", *_fp8("blockwise")),
    *(
        _shared(f"{scaling} {layout}2", f"parallel.{layout}=2", *_fp8(scaling))
        for scaling in ("blockwise", "tensorwise")
        for layout in ("tp", "pp", "ep")
    ),
    _shared("blockwise packed cp2", "parallel.cp=2", *_fp8("blockwise"), *_PACKED),
)

SPEEDS = tuple(
    Case(f"{shape} {name}", str(_HERE / f"{shape}.yaml"), overrides, cuda=16)
    for shape, lora in (("gqa", _LORA), ("latent", _LORA_LATENT))
    for name, overrides in (
        ("bf16", ()),
        ("bf16 lora", lora),
        ("bf16 micro-batch 8", ("train.micro_batch_size=8",)),
        ("tensorwise", _fp8("tensorwise")),
        ("tensorwise lora", (*_fp8("tensorwise"), *lora)),
        ("blockwise", _fp8("blockwise")),
    )
)

# The speed of two GPUs as a share of one's: twice the rows of a step, so that a GPU does equal work.
_TWICE = ("train.global_batch_size=16",)
_LONG = (
    "data.packed=true",
    'data.separator="\n\n\n"',
    "data.sequence_length=8192",
    "model.config.max_position_embeddings=8192",
    "train.micro_batch_size=1",
)
_SHARED_TENSORS = ("parallel.tp=2", "parallel.sequence_parallel=true")
# A plan sets it to 1 for tensor and context parallelism.
_WITHOUT = ("CUDA_DEVICE_MAX_CONNECTIONS",)
_TWO_GPUS: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("gqa", "dp2", ("distributed={overlap_grad_reduce: true, overlap_param_gather: true}",), ()),
    ("gqa", "tp2", _SHARED_TENSORS, ()),
    ("gqa", "tp2, many connections", _SHARED_TENSORS, _WITHOUT),
    ("gqa", "pp2", ("parallel.pp=2",), ()),
    ("gqa", "pp2 vpp2", ("parallel.pp=2", "parallel.vpp=2"), ()),
    ("latent", "ep2", ("parallel.ep=2",), ()),
    ("latent", "tp2 etp1 ep2", (*_SHARED_TENSORS, "parallel.etp=1", "parallel.ep=2"), ()),
)
SHARES = (
    *(
        Case(
            f"{shape} bf16 {layout}",
            str(_HERE / f"{shape}.yaml"),
            (*_TWICE, *changes),
            16,
            gpus=2,
            without=left_out,
        )
        for shape, layout, changes, left_out in _TWO_GPUS
    ),
    Case("gqa bf16 long packs", str(_HERE / "gqa.yaml"), (*_LONG, "train.global_batch_size=4"), 16),
    Case("gqa bf16 long packs cp2", str(_HERE / "gqa.yaml"), (*_LONG, "parallel.cp=2"), 16, gpus=2),
    Case(
        "gqa bf16 long packs cp2, many connections",
        str(_HERE / "gqa.yaml"),
        (*_LONG, "parallel.cp=2"),
        16,
        gpus=2,
        without=_WITHOUT,
    ),
)

# What a step's peak is made of. fp32 has no fused attention on a GPU: its probabilities are kept.
_FULL = ("model.recompute.granularity=full",)
_HELD = {
    "bf16": (),
    "fp32": ("model.dtype=fp32", "data.sequence_length=2048", "train.micro_batch_size=1"),
    "packed": ("data.packed=true", 'data.separator="\n\n\n"', "train.micro_batch_size=1"),
    "full": _FULL,
    "blockwise full": (*_fp8("blockwise"), *_FULL, "model.mtp.layers=0"),
    "delayed": _fp8("delayed"),
    "tensorwise": _fp8("tensorwise"),
    "blockwise": _fp8("blockwise"),
    "sgd": (*_SGD, *_UNDIVIDED),
}
_FEW = {"gqa": "[q_proj, v_proj]", "latent": "[q_b_proj, kv_b_proj]"}
MEMORY = tuple(
    Case(f"memory {shape} {name}", str(_HERE / f"{shape}.yaml"), ("train.global_batch_size=4", *changes), 3)
    for shape, few in _FEW.items()
    for name, changes in {**_HELD, "lora": (f"model.lora={{rank: 8, alpha: 64, targets: {few}}}",)}.items()
)

CASES = {case.name: case for case in (*CURVES, *LAYOUTS, *SPEEDS, *SHARES, *MEMORY)}
