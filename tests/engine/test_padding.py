"""The padding rows of a vocabulary have no share in a softmax, whichever ranks hold them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")
from bundle.engine.losses import ModelLossComputer
from bundle.engine.scores import mask_padding, score_labels
from bundle.recipe.loss_chunks import LossChunks

VOCABULARY, WIDTH, RANKS = 50, 32, 4  # whole, in part, and two ranks of nothing else


def tap(rank: int, model: Any = None, chunks: LossChunks | None = None) -> ModelLossComputer:
    model = model or SimpleNamespace(compute_language_model_loss=None, post_process=False)
    group: Any = SimpleNamespace(rank=lambda: rank)
    device = torch.device("cpu")
    return ModelLossComputer(
        model, depths=0, mtp_loss_scale=0, vocabulary=VOCABULARY, chunks=chunks, tp_group=group, device=device
    )


def test_the_head_takes_tokens_as_the_recipe_chooses():
    layer: Any = SimpleNamespace(weight=None, sequence_parallel=False)
    model = SimpleNamespace(
        compute_language_model_loss=None,
        post_process=True,
        output_layer=layer,
        register_forward_pre_hook=lambda *_, **__: None,
    )
    computer = tap(1, model, LossChunks(kept_tokens=5, size=3))
    layer.forward(torch.zeros(4, 1, 8), weight=torch.zeros(WIDTH, 8), runtime_gather_output=None)
    assert computer._head is not None
    assert (computer._head.kept_tokens, computer._head.chunk, computer._head.limit) == (
        5,
        3,
        VOCABULARY - WIDTH,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_over_ranks_the_softmax_is_that_of_the_vocabulary(dtype):
    torch.manual_seed(4)
    leaf = (torch.randn(5, 2, WIDTH * RANKS) * 20).to(dtype).requires_grad_()
    shards = [shard * 1 for shard in leaf.chunk(RANKS, -1)]  # no leaves, as megatron's are not
    for rank, shard in enumerate(shards):
        function = shard.grad_fn
        mask_padding(shard, tap(rank)._count_unpadded_local_logits(WIDTH))
        assert shard.grad_fn is function, "autograd would copy the gradient of all logits"
    whole = torch.cat(shards, -1)
    assert torch.equal(whole[..., :VOCABULARY], leaf[..., :VOCABULARY])
    labels = torch.randint(0, VOCABULARY, (2, 5))
    plain = leaf.detach()[..., :VOCABULARY].requires_grad_()
    temperature = torch.full((2, 5), 0.01)
    for given in (None, temperature):
        ours, theirs = score_labels(whole, labels, None, given), score_labels(plain, labels, None, given)
        torch.testing.assert_close(ours.log_probs, theirs.log_probs)
        torch.testing.assert_close(ours.entropy, theirs.entropy)
        for of in (ours, theirs):
            (of.log_probs.sum() + of.entropy.sum()).backward(retain_graph=True)
    assert leaf.grad is not None and plain.grad is not None
    torch.testing.assert_close(leaf.grad[..., :VOCABULARY], plain.grad)
    assert not leaf.grad[..., VOCABULARY:].any()
