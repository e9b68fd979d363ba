"""Log-probabilities and entropies are those of a float64 log_softmax, and so are their gradients."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("megatron.core")
from bundle.engine import scores
from bundle.engine.scores import score_labels

S, B, V = 7, 3, 50


def drawn(dtype=torch.float32, scale=5.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(S, B, V, generator=generator).mul(scale).to(dtype)
    labels = torch.randint(0, V, (B, S), generator=generator)
    temperature = torch.rand(B, S, generator=generator) + 0.5
    return logits, labels, temperature


def reference(logits, labels, temperature=None):
    """(log-probabilities, entropies) [b, s] in float64, as anybody would write them."""
    x = logits.double().transpose(0, 1)
    if temperature is not None:
        x = x / temperature.double()[..., None]
    log_p = x.log_softmax(-1)
    return log_p.gather(-1, labels[..., None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("tempered", [False, True])
@pytest.mark.parametrize("portion", [1, 3 * V, 1 << 25], ids=["row by row", "uneven portions", "at once"])
def test_values_and_gradients(monkeypatch, tempered, portion):
    monkeypatch.setattr(scores, "_PORTION_VALUES", portion)
    logits, labels, temperature = drawn()
    temperature = temperature if tempered else None
    ours, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    seen = score_labels(ours, labels, None, temperature)
    wanted = reference(theirs, labels, temperature)
    torch.testing.assert_close(seen.log_probs.double(), wanted[0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(seen.entropy.double(), wanted[1], rtol=1e-6, atol=1e-5)

    weights = torch.randn(2, B, S, generator=torch.Generator().manual_seed(1))
    (weights[0] * seen.log_probs + weights[1] * seen.entropy).sum().backward()
    (weights[0].double() * wanted[0] + weights[1].double() * wanted[1]).sum().backward()
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-6)


def test_a_label_that_has_no_logit_has_no_log_probability():
    logits, labels, _ = drawn()
    labels[0, 1], labels[2, 3], labels[1, 6] = -100, V, V + 78
    none = (labels < 0) | (labels >= V)
    ours = logits.clone().requires_grad_()
    seen = score_labels(ours, labels, None)
    assert torch.equal(seen.log_probs.isnan(), none) and seen.entropy.isfinite().all()
    wanted = reference(logits, labels.clamp(0, V - 1))[0]
    torch.testing.assert_close(seen.log_probs[~none].double(), wanted[~none], rtol=1e-6, atol=1e-5)
    seen.log_probs.sum().backward()
    assert torch.equal(ours.grad.isnan().any(-1).t(), none)


@pytest.mark.parametrize("which", ["log_probs", "entropy"])
def test_either_may_be_left_undifferentiated(which):
    logits, labels, temperature = drawn(torch.float64)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: getattr(score_labels(x, labels, None, temperature.double()), which),
        (logits,),
        fast_mode=True,
    )


def test_large_logits_stay_finite():
    logits, labels, _ = drawn(scale=2000.0)
    logits.requires_grad_()
    seen = score_labels(logits, labels, None)
    wanted = reference(logits.detach(), labels)
    torch.testing.assert_close(seen.log_probs.double(), wanted[0], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(seen.entropy.double(), wanted[1], rtol=1e-5, atol=1e-4)
    (seen.log_probs + seen.entropy).sum().backward()
    assert torch.isfinite(logits.grad).all()


def test_half_precision_is_computed_in_single():
    logits, labels, _ = drawn(torch.bfloat16)
    logits.requires_grad_()
    seen = score_labels(logits, labels, None)
    assert seen.log_probs.dtype == torch.float32
    torch.testing.assert_close(
        seen.log_probs.double(), reference(logits.detach(), labels)[0], rtol=1e-6, atol=1e-5
    )
    seen.log_probs.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


class Largest(TorchDispatchMode):
    """How many tensors as large as the logits were made inside."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel = numel
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() >= 2 * self.numel:
                self.seen.add(tensor.untyped_storage().data_ptr())
        return out


def test_nothing_but_the_gradient_is_as_large_as_the_logits(monkeypatch):
    """Where the logits are more than a portion; a float32 softmax of bf16 logits would be twice as large."""
    monkeypatch.setattr(scores, "_PORTION_VALUES", 2 * V)
    logits, labels, temperature = drawn(torch.bfloat16)
    logits.requires_grad_()
    with Largest(logits.numel()) as largest:
        seen = score_labels(logits, labels, None, temperature)
        (seen.log_probs + seen.entropy).sum().backward()
    assert largest.seen <= {logits.untyped_storage().data_ptr(), logits.grad.untyped_storage().data_ptr()}
