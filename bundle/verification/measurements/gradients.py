"""Gradients as the schedule and the data-parallel wrapper leave them."""

from bundle.mcore.groups import Groups
from bundle.verification.bench import Bench
from bundle.verification.numbers import Numbers, gap, norm_gap, stepped
from bundle.verification.tiny import DENSE, chunk, recipe


def per_token(bench: Bench) -> float:
    """The gradient norm of a loss per token: the same rows shared by two ranks, and on each of them."""
    return norm_gap(bench, DENSE, cp=2)


def shared_embedding(bench: Bench) -> float:
    """A step of a model whose embedding megatron has marked as shared by stages, against one without.

    What lies before it in the buffer is an odd number of times 64: the norm at the end of the last layer is.
    """
    with bench.layout() as groups:
        return gap(_step(bench, groups, shared=True), _step(bench, groups, shared=False))


def _step(bench: Bench, groups: Groups, *, shared: bool) -> Numbers:
    """The gradient norm and what a step makes of the weights."""
    model = chunk(bench, groups, DENSE)
    if shared:
        vars(model.get_parameter("embedding.word_embeddings.weight"))["shared_embedding"] = True
    norm = stepped(bench, groups, recipe(DENSE, groups), model)
    return {"norm": norm, **{name: x.detach().clone() for name, x in model.named_parameters()}}
