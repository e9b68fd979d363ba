"""The peer that speeds are compared with learns the same from any micro-batch size."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu.peer import add_fp32_masters, compute_loss, read_batches, score_pairs, split_batch

CPU = torch.device("cpu")
CASE: dict[str, Any] = {"sequence_length": 12, "sequences": 4, "ids": [3, 5, 6], "prompt_length": 5}


class Model(torch.nn.Module):
    """Logits that depend on the token alone, and the mean loss of next tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Embedding(8, 8)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> SimpleNamespace:
        logits = self.logits(ids)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:])
        return SimpleNamespace(logits=logits, loss=loss)


@pytest.mark.parametrize("task", ["full", "dpo"])
def test_the_loss_of_a_step_is_the_same_for_every_micro_batch_size(task):
    case, model, reference = CASE | {"task": task}, Model(), Model()
    batch = next(read_batches(case))
    losses = []
    for size in (1, 2, 4):
        if task == "dpo":
            batch["base"] = score_pairs(case, reference, batch, size, CPU)
        parts = list(split_batch(batch, case["sequences"] // size, CPU))
        assert len(parts) == case["sequences"] // size
        losses.append(sum(compute_loss(case, model, part).item() for part in parts) / len(parts))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_the_loss_of_pairs_compares_the_responses_alone():
    case, model, reference = CASE | {"task": "dpo"}, Model(), Model()
    batch = next(read_batches(case))
    batch["base"] = score_pairs(case, reference, batch, 2, CPU)
    margins = []
    for which in (model, reference):
        log_probs = which.logits.weight.log_softmax(-1)
        rows = [sum(log_probs[row[at - 1], row[at]] for at in range(5, 12)) for row in batch["ids"].tolist()]
        margins.append(torch.stack(rows).view(-1, 2) @ torch.tensor([1.0, -1.0]))
    expected = torch.log1p(torch.exp(-0.1 * (margins[0] - margins[1]))).mean()
    assert float(compute_loss(case, model, batch)) == pytest.approx(float(expected), rel=1e-5)


def test_gradients_of_micro_batches_add_up_in_the_fp32_copies():
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    (master,) = add_fp32_masters([weight])
    for _ in range(257):  # bf16 would stay at 256
        weight.sum().backward()
    assert master.grad is not None and master.grad.dtype == torch.float32 and weight.grad is None
    assert master.grad.tolist() == [257.0] * 3
