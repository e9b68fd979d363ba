"""A whole model: the logits of the main head and of every depth of multi-token prediction."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.reference import experts, losses
from tests.reference.layers import Config, Weights, attention, feed_forward, norm, norm_epsilon, under
from tests.reference.texts import Text


def heads(config: Config, weights: Weights, ids: Tensor) -> list[Tensor]:
    """Logits [n, vocabulary] for `ids` [n]: of the next token, then of those further ahead."""
    epsilon, embedding = norm_epsilon(config), weights["model.embed_tokens.weight"]
    output = embedding if config.get("tie_word_embeddings") else weights["lm_head.weight"]
    layers = config["num_hidden_layers"]
    hidden = embedding[ids]
    for layer in range(layers):
        hidden = _decoder_layer(config, weights, layer, hidden)
    hidden = norm(hidden, weights["model.norm.weight"], epsilon)
    found = [hidden @ output.t()]
    for depth in range(1, depths(config) + 1):
        own = under(weights, f"model.layers.{layers + depth - 1}.")
        later = embedding[F.pad(ids[depth:], (0, min(depth, len(ids))))]  # no loss reads what stands behind
        both = norm(later, own["enorm.weight"], epsilon), norm(hidden, own["hnorm.weight"], epsilon)
        hidden = torch.cat(both, -1) @ own["eh_proj.weight"].t()
        hidden = _decoder_layer(config, weights, layers + depth - 1, hidden)
        hidden = norm(hidden, own["shared_head.norm.weight"], epsilon)
        found.append(hidden @ output.t())
    return found


def depths(config: Config) -> int:
    """How many further tokens are predicted."""
    predicts = config["model_type"] in ("mimo", *experts.STEERED)
    return int(config.get("num_nextn_predict_layers", 0)) if predicts else 0


def trained(
    config: Config, weights: Weights, sequences: Sequence[Text], *, scale: float
) -> dict[str, Tensor]:
    """Every loss, the scores of each sequence, and `gradient NAME` of every weight that has one."""
    total, found = losses.computed(
        lambda text: heads(config, weights, text.tokens[:-1]),
        sequences,
        depths=depths(config),
        scale=scale,
    )
    learned = {name: weight for name, weight in weights.items() if weight.requires_grad}
    gradients = torch.autograd.grad(total, learned.values(), materialize_grads=True)
    return found | {f"gradient {name}": of for name, of in zip(learned, gradients, strict=True)}


def _decoder_layer(config: Config, weights: Weights, layer: int, x: Tensor) -> Tensor:
    own, epsilon = under(weights, f"model.layers.{layer}."), norm_epsilon(config)
    seen = norm(x, own["input_layernorm.weight"], epsilon)
    x = x + attention(config, under(own, "self_attn."), seen, layer)
    seen = norm(x, own["post_attention_layernorm.weight"], epsilon)
    if experts.stand_in(config, layer):
        return x + experts.mixture(config, under(own, "mlp."), seen)
    return x + feed_forward(seen, under(own, "mlp."))
