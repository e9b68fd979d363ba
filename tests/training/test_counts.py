"""Tokens and FLOPs of a step are those of every replica, however unequal the replicas' sequences are."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("megatron.core")
import torch

from bundle.data import Loader, prepare
from bundle.planning.size import compute_model_size
from bundle.recipe import load
from bundle.runs.metrics import Speed
from bundle.training.loop import Batches

ROWS = [{"prompt": f"{n}?", "response": "ab" * (1 + n * n % 13)} for n in range(16)]
PAIRS = [{"prompt": of["prompt"], "chosen": of["response"], "rejected": "no"} for of in ROWS]
SHAPE = ("data.sequence_length=128", "data.validation=0", "parallel.ep=1", "train.global_batch_size=6")
DP = 3


@pytest.mark.parametrize("task", ["sft", "dpo"])
@pytest.mark.parametrize("packed", ["true", "false"])
def test_every_rank_counts_the_sequences_of_all_replicas(tmp_path, task, packed):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS if task == "sft" else PAIRS)))
    source = (f"task={task}", "data.source=jsonl", f"data.path={path}", "data.separator=null")
    how = (f"data.packed={packed}", "train.micro_batch_size=1", "model.mtp.layers=0")
    recipe = load("demo", (*source, *SHAPE, *how))
    corpus, cpu = prepare(recipe, tmp_path / "tokens"), torch.device("cpu")
    alone = SimpleNamespace(size=1, rank=0)
    counted, lengths, shares = [], [], []
    for rank in range(DP):
        loader = Loader(recipe, corpus, rank, DP)
        groups = SimpleNamespace(cp=alone, dp=SimpleNamespace(size=DP, rank=rank))
        batches = Batches(recipe, loader, groups, cpu)  # type: ignore[arg-type]
        batches.build_training_batches(6)
        flops = Speed(recipe, "cpu", cpu, dp=DP).compute_flops_per_rank(*batches.sizes)
        counted.append((int(batches.sizes.lengths.sum()), flops))
        own = [n for batch in loader.read_training_step(6) for n in batch.lengths or batch.row_lengths or ()]
        shares.append(sum(own))
        lengths += own
    assert len(set(shares)) > 1, "the replicas have unequal work"
    size = compute_model_size(recipe.architecture, recipe.model)
    assert counted == [(sum(lengths), size.count_training_flops(lengths) / DP)] * DP
