"""What a checkpoint of prediction layers is handed, and what is left of a graph behind a layer of experts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bundle.replacements.moe import detach_dispatcher_tensors
from bundle.replacements.mtp import bind_non_tensor_arguments, bind_padding_mask


@pytest.fixture
def checkpointed() -> Any:
    """Megatron's own, of 0.16 and 0.17; with settings under which it recomputes."""
    module = pytest.importorskip("megatron.core.transformer.multi_token_prediction")
    original = module.MultiTokenPredictionLayer._checkpointed_forward
    if "forward_func" not in original.__code__.co_varnames:
        pytest.skip("0.18 and later have another one")
    return original


@pytest.mark.usefixtures("megatron")
def test_a_checkpoint_takes_objects_and_recomputes_with_them(checkpointed):
    layer = SimpleNamespace(
        config=SimpleNamespace(
            fp8=None, recompute_method="uniform", recompute_num_layers=1, distribute_saved_activations=False
        )
    )
    calls = []

    def forward(hidden, mask, bias, pack):
        calls.append(pack)
        return (hidden * mask).exp() * pack.factor + (0 if bias is None else bias)

    pack, mask = SimpleNamespace(factor=3.0), torch.tensor([1.0, 0.5])
    hidden = torch.randn(4, 2, requires_grad=True)
    given = {"mask": mask, "bias": None, "pack": pack}
    with pytest.raises(TypeError, match="for_backward"):
        checkpointed(layer, forward, hidden, **given)
    calls.clear()
    out = bind_non_tensor_arguments(checkpointed)(layer, forward, hidden, **given)
    out.sum().backward()
    assert calls == [pack, pack]  # once more, in the backward pass
    torch.testing.assert_close(out, 3 * (hidden * mask).exp())
    torch.testing.assert_close(hidden.grad, 3 * mask * (hidden * mask).exp())


def test_a_padding_mask_reaches_the_layer_that_its_checkpoint_forgot():
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

        def _proj_and_transformer_layer(self, hidden: Any, padding_mask: Any = None) -> Any:
            return hidden * self.weight, padding_mask

    def original(self, hidden):
        """As 0.18 has it: no word of the mask."""
        return self._proj_and_transformer_layer(hidden=hidden)

    layer, mask = Layer(), torch.tensor([True, False])
    out, seen = bind_padding_mask(original)(layer, hidden=torch.full((2,), 3.0), padding_mask=mask)
    assert seen is mask
    out.sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((2,), 3.0))
    assert original(layer, torch.ones(2))[1] is None  # the layer itself is as it was
    assert bind_padding_mask(original)(layer, hidden=torch.ones(2))[1] is None


def test_the_dispatcher_lets_go_of_the_graph_and_keeps_its_numbers():
    leaf = torch.ones(3, requires_grad=True)

    def original(self, x, *, bias):
        self.token_dispatcher.probs = x * 2
        self.token_dispatcher._comm_manager.weights = x * 3
        return x * 2 + bias

    manager = SimpleNamespace(weights=None, handle="h")
    dispatcher = SimpleNamespace(_comm_manager=manager, leaf=leaf, probs=None, counts=torch.arange(2))
    layer = SimpleNamespace(token_dispatcher=dispatcher)
    out = detach_dispatcher_tensors(original)(layer, leaf, bias=1.0)
    assert out.grad_fn is not None and torch.equal(out, torch.full((3,), 3.0))
    assert dispatcher.probs.grad_fn is None and torch.equal(dispatcher.probs, torch.full((3,), 2.0))
    assert manager.weights.grad_fn is None and torch.equal(manager.weights, torch.full((3,), 3.0))
    assert dispatcher.leaf is leaf and manager.handle == "h"
    del dispatcher._comm_manager

    def without_manager(self, x):
        self.token_dispatcher.probs = x * 2
        return x

    detach_dispatcher_tensors(without_manager)(layer, leaf)
    assert dispatcher.probs.grad_fn is None
