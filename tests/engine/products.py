"""Products of one rank's steps that repeat a matrix: a micro-batch of one row or pack has none.

python -m tests.engine.products prints the shapes of those that there are, by case; null: the plan refuses.
"""

from typing import Any

import torch

from bundle.engine import Engine, MicroBatch, Scores
from bundle.engine.microbatch import from_packing, from_rows
from bundle.mcore import groups
from bundle.packing.packing import Packing
from bundle.planning import build_plan
from bundle.recipe import Recipe, from_mapping
from bundle.recipe.alignment import Alignment
from bundle.verification.numbers import DENSE_HF_CONFIG, EXPERTS_CONFIG, MLA_CONFIG
from bundle.verification.products import BroadcastProductRecorder
from tests.ranks import finish_rank, start_rank

TOKENS = 40
_GATED = ["o_proj", "gate_proj", "up_proj", "down_proj"]
_PROJECTIONS = ["q_proj", "k_proj", "v_proj", *_GATED]
_LATENT_PROJECTIONS = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", *_GATED]
_PREDICTING = MLA_CONFIG | {"num_nextn_predict_layers": 1}
# name -> (config, projections with adapters)
MODELS: dict[str, tuple[dict, list[str]]] = {
    "dense": (DENSE_HF_CONFIG, []),
    "latent with MTP": (_PREDICTING, []),
    "experts": (EXPERTS_CONFIG, []),
    "dense LoRA": (DENSE_HF_CONFIG, _PROJECTIONS),
    "latent LoRA with MTP": (_PREDICTING, _LATENT_PROJECTIONS),
    "experts LoRA": (EXPERTS_CONFIG, _PROJECTIONS),
}


def main() -> None:
    runtime, _ = start_rank()
    shapes: dict[str, Any] = {}
    with runtime.megatron_calls():
        for name, (config, targets) in MODELS.items():
            for packed in (False, True):
                job, case = recipe(config, targets, packed=packed), f"{name}, {'pack' if packed else 'row'}"
                if build_plan(job, backend="cpu").problems:  # packs with MTP, up to 0.14
                    shapes[case] = None
                    continue
                layout = groups.create_model_parallel_groups(job.parallel, seed=1, timeout_seconds=60)
                engine = Engine(job, runtime, layout, torch.device("cpu"))
                shapes[case] = repeated_shapes(engine)
                groups.destroy_model_parallel_groups()
    finish_rank(shapes)


def recipe(config: dict, targets: list[str], *, packed: bool) -> Recipe:
    lora = {"rank": 4, "alpha": 8, "targets": targets} if targets else None
    return from_mapping(
        {
            "name": "products",
            "model": {"config": config, "dtype": "fp32", "lora": lora},
            "data": {
                "source": "text",
                "path": ["none"],
                "tokenizer": "hf:none",
                "sequence_length": TOKENS,
                "packed": packed,
            },
            "train": {"steps": 2, "global_batch_size": 1},
            "optimizer": {"warmup_steps": 0},
        }
    )


def repeated_shapes(engine: Engine) -> Any:
    """The shapes of repeated products in training, with an objective, in evaluation and in scoring."""
    batches = [micro_batch(engine.recipe)]

    def objective(_: MicroBatch, scores: Scores) -> torch.Tensor:
        return -scores.log_probs - 0.1 * scores.entropy

    with BroadcastProductRecorder() as repeated:
        engine.forward_backward(batches)
        engine.forward_backward(batches, objective)
        engine.evaluate(batches)
        engine.compute_log_probs(batches)
        if engine.recipe.model.lora is None:
            engine.keep_reference()
        engine.compute_reference_log_probs(batches)
    return repeated.shapes


def micro_batch(job: Recipe) -> MicroBatch:
    ids = torch.arange(TOKENS) % job.architecture.vocab_size
    labels, mask, depths = ids.roll(-1), torch.ones(TOKENS), job.architecture.mtp_layers
    if not job.data.packed:
        return from_rows(ids[None], labels[None], mask[None], cp=1, rank=0, mtp_layers=depths)
    alignment = Alignment("thd", tp=1, cp=1, sequence_parallel=False)
    packing = Packing.from_lengths([17, TOKENS - 17], alignment, rank=0, length=TOKENS + 8)
    return from_packing(ids, labels, mask, packing, mtp_layers=depths)


if __name__ == "__main__":
    main()
