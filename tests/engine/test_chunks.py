"""In chunks of tokens, scores and gradients are those of float64 logits of all tokens at once."""

import functools

import pytest
import torch

pytest.importorskip("megatron.core")
from bundle.engine import scores
from bundle.engine.scores import Head, Scores, score_labels
from tests.engine.cells import AGREES_WITH_DOUBLES
from tests.engine.test_layouts import seen_by, wrong
from tests.engine.test_scores import Largest

S, B, H, ROWS, VOCABULARY = 37, 2, 12, 64, 53  # 11 rows of the weight are padding


def drawn(dtype=torch.float32, scale=3.0, tokens=S):
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(tokens, B, H, generator=generator).to(dtype)
    weight = torch.randn(ROWS, H, generator=generator).mul(scale).to(dtype)
    labels = torch.randint(0, VOCABULARY, (B, tokens), generator=generator)
    return states.requires_grad_(), weight.requires_grad_(), labels


def reference(states, weight, labels, temperature=None):
    """(log-probabilities, entropies, gradients of both inputs) in float64."""
    states, weight = (tensor.detach().double().requires_grad_() for tensor in (states, weight))
    x = (states @ weight.t())[..., :VOCABULARY].transpose(0, 1)
    log_p = (x if temperature is None else x / temperature.double()[..., None]).log_softmax(-1)
    log_probs = log_p.gather(-1, labels[..., None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    loss(Scores(log_probs, entropy), labels).backward()
    return log_probs.detach(), entropy.detach(), states.grad, weight.grad


def loss(found, labels):
    """A sum with another weight for each token; a third of the tokens has none."""
    factors = torch.linspace(-1.5, 2.5, labels.numel(), dtype=torch.float64).view(labels.shape)
    factors = factors * (torch.arange(labels.numel()).view(labels.shape) % 3 > 0)
    return (factors * found.log_probs.double() + factors.flip(-1) * found.entropy.double()).sum()


def close(seen, wanted, near=1e-5):
    return float((seen.detach().double() - wanted).abs().max()) <= near * max(1.0, float(wanted.abs().max()))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("portion", [1, 1 << 25], ids=["row by row", "at once"])
@pytest.mark.parametrize("kept", [0, 1, 30, 1000])
@pytest.mark.parametrize("chunk", [1, 10, 2 * S, 1000])
@pytest.mark.parametrize(("scale", "near"), [(3.0, 1e-5), (1000.0, 3e-3)], ids=["usual", "large logits"])
def test_values_and_gradients(monkeypatch, chunk, kept, scale, near, portion):
    monkeypatch.setattr(scores, "_PORTION_VALUES", portion)
    states, weight, labels = drawn(scale=scale)
    temperature = torch.linspace(0.4, 2.0, B * S).view(B, S)
    seen = score_labels(states, labels, None, temperature, Head(weight, chunk, VOCABULARY, kept_tokens=kept))
    loss(seen, labels).backward()
    log_probs, entropy, *gradients = reference(states, weight, labels, temperature)
    assert close(seen.log_probs, log_probs) and close(seen.entropy, entropy, near)
    assert close(states.grad, gradients[0], near) and close(weight.grad, gradients[1], near)
    assert not weight.grad[VOCABULARY:].any()


def test_values_and_gradients_of_compiled_functions(monkeypatch):
    """As a GPU computes chunks, with the graphs of torch.compile but not its kernels."""
    monkeypatch.setattr(scores, "_is_compiled", lambda weight: weight is not None)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(scores, "_compile", functools.cache(scores._compile.__wrapped__))
    states, weight, labels = drawn()
    seen = score_labels(states, labels, None, None, Head(weight, 20, VOCABULARY, kept_tokens=31))
    loss(seen, labels).backward()
    log_probs, entropy, *gradients = reference(states, weight, labels)
    assert close(seen.log_probs, log_probs) and close(seen.entropy, entropy)
    assert close(states.grad, gradients[0]) and close(weight.grad, gradients[1])


def test_a_chunk_of_all_tokens_is_the_plain_way():
    states, weight, labels = drawn(torch.bfloat16)
    seen = score_labels(states, labels, None, None, Head(weight, B * S, ROWS))
    (seen.log_probs.sum() + seen.entropy.sum()).backward()
    ours = [states.grad, weight.grad]
    states.grad = weight.grad = None
    plain = score_labels(states @ weight.t(), labels, None)
    (plain.log_probs.sum() + plain.entropy.sum()).backward()
    assert torch.equal(seen.log_probs, plain.log_probs) and torch.equal(seen.entropy, plain.entropy)
    assert all(map(torch.equal, ours, (states.grad, weight.grad)))


def test_no_tokens():
    states, weight, labels = drawn(tokens=0)
    seen = score_labels(states, labels, None, None, Head(weight, 8, VOCABULARY, kept_tokens=8))
    assert seen.log_probs.shape == seen.entropy.shape == (B, 0)
    (seen.log_probs.sum() + seen.entropy.sum()).backward()
    assert states.grad.shape == (0, B, H) and torch.equal(weight.grad, torch.zeros(ROWS, H))


def test_megatron_s_gradient_is_added_to_in_float32():
    """Where its type is narrower, chunks are added up beside it, in float32 as well."""
    states, weight, labels = drawn(torch.bfloat16)
    seen = []
    for dtype, first in ((torch.float32, 1000.0), (torch.bfloat16, 0.0)):
        weight.main_grad, weight.grad = torch.full((ROWS, H), first, dtype=dtype), None
        loss(score_labels(states, labels, None, None, Head(weight, 1, VOCABULARY)), labels).backward()
        seen.append((weight.main_grad.clone() - first, weight.grad))
    (main, zeros), (untouched, returned) = seen
    assert not zeros.any() and not untouched.any()
    torch.testing.assert_close(returned.float(), main, rtol=2**-7, atol=2e-3)


def test_a_product_that_adds_is_given_each_part_of_the_gradient():
    states, weight, labels = drawn()
    weight.main_grad = torch.full((ROWS, H), 7.5)
    parts = []

    def add_gradient(inputs, gradients, total):
        parts.append(len(inputs))
        total += torch.einsum("nv,nh->vh", gradients, inputs)

    loss(
        score_labels(states, labels, None, None, Head(weight, 20, VOCABULARY, add_gradient)), labels
    ).backward()
    assert close(weight.main_grad - 7.5, reference(states, weight, labels)[3]) and not weight.grad.any()
    assert parts == [20, 20, 20, 14]


def test_a_label_without_a_logit_has_no_log_probability():
    states, weight, labels = drawn()
    labels[0, 3], labels[1, 30] = -100, ROWS
    seen = score_labels(states, labels, None, None, Head(weight, 5, VOCABULARY))
    unknown = (labels < 0) | (labels >= ROWS)
    assert torch.equal(seen.log_probs.isnan(), unknown) and seen.entropy.isfinite().all()


def test_a_frozen_weight_has_no_gradient():
    states, weight, labels = drawn()
    weight.requires_grad_(False)
    loss(score_labels(states, labels, None, None, Head(weight, 5, VOCABULARY)), labels).backward()
    assert weight.grad is None and close(states.grad, reference(states, weight, labels)[2])


@pytest.mark.parametrize("trains", [True, False])
def test_no_tensor_is_as_large_as_the_logits_of_all_tokens(monkeypatch, trains):
    monkeypatch.setattr(scores, "_PORTION_VALUES", ROWS)
    states, weight, labels = drawn(torch.bfloat16, tokens=400)
    with Largest(states.numel() + 1) as largest, torch.set_grad_enabled(trains):
        seen = score_labels(states, labels, None, None, Head(weight, 8, VOCABULARY))
        if trains:
            (seen.log_probs.sum() + seen.entropy.sum()).backward()
    assert not largest.seen and ROWS > H


def test_logits_are_kept_for_a_backward_pass_alone(monkeypatch):
    monkeypatch.setattr(scores, "_PORTION_VALUES", ROWS)
    states, weight, labels = drawn(torch.bfloat16, tokens=400)
    with Largest(states.numel() + 1) as largest, torch.no_grad():
        score_labels(states, labels, None, None, Head(weight, 8, VOCABULARY, kept_tokens=800))
    assert not largest.seen and ROWS > H


def test_gradients_over_kept_logits_are_computed_once():
    states, weight, labels = drawn()
    seen = score_labels(states, labels, None, None, Head(weight, 8, VOCABULARY, kept_tokens=9))
    loss(seen, labels).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss(seen, labels).backward()


@pytest.mark.world
def test_over_tensor_ranks(installed):
    ranks = {"one": 1, "two": 2, "two_without_sequence_parallel": 2, "four": 4}
    ranks |= dict.fromkeys(("trained", "detached", "scored"), 2)
    sizes = {f"tests.engine.chunking:{name}": size for name, size in ranks.items()}
    assert not wrong(seen_by(installed, sizes), AGREES_WITH_DOUBLES)
