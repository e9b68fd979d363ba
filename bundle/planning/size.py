"""The size of a model, from its list of parameters: how many, active ones, floating-point operations (FLOPs)
of training, bytes of a checkpoint.

FLOPs of a forward pass are those of the model's matrix products, 2 for each multiply-add:

- a weight matrix once for each token; of routed experts the `topk` that a token goes through; the output
  layer once for each loss, the main one and MTP's; the embedding is a look-up;
- in every layer a query meets the keys up to its own position: n tokens make n (n + 1) / 2 pairs, each of as
  many multiply-adds as all heads of a key and of a value are wide.

The backward pass takes twice as many. Norms, rotations, softmax and all else that goes element by element is
not counted, nor is padding (of the vocabulary too), nor what recomputation does again. This is what model
FLOPs utilisation (MFU) is computed from (Chowdhery et al., "PaLM", 2022, appendix B), but for causality,
which that leaves out.
"""

from collections.abc import Iterable
from typing import NamedTuple

from bundle.architectures import Architecture, padded_vocabulary
from bundle.capabilities import LOCAL
from bundle.planning.layout import whole_model
from bundle.planning.parameters import Parameter, parameters
from bundle.recipe import Parallel
from bundle.recipe.sections import Optimizer

# Which layers are fused changes no count.
_TRAITS = LOCAL
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_FP32, _BF16 = 4, 2


class ModelSize(NamedTuple):
    """Parameters of a model, rows of padding aside; FLOPs of a forward pass."""

    parameters: int  # without MTP layers
    active: int  # of these, what a token has to do with: not the experts that it is not sent to
    mtp: int  # of the MTP layers
    flops_per_token: int  # in weights
    flops_per_pair: int  # of a query and a key that it sees, over all layers
    stored: int  # parameters of a checkpoint: all, with the rows of padding

    def training_flops(self, lengths: Iterable[int]) -> int:
        """FLOPs of training on sequences of these lengths, forward and backward."""
        tokens, pairs = 0, 0
        for length in lengths:
            tokens, pairs = tokens + length, pairs + length * (length + 1) // 2
        return self.step_flops(tokens, pairs)

    def step_flops(self, tokens: int, pairs: int) -> int:
        """The same from the sums over the sequences: their tokens, and their pairs of query and key."""
        return 3 * (tokens * self.flops_per_token + pairs * self.flops_per_pair)

    def checkpoint_bytes(self, dtype: str, optimizer: Optimizer) -> int:
        """Bytes of a checkpoint: the weights in `dtype` (bf16, fp32), an fp32 copy, the optimizer's state.

        A copy of what is fp32 itself is there where the optimizer's state is divided between ranks.
        """
        bf16 = dtype == "bf16"
        in_fp32 = len(optimizer.states) + (bf16 or optimizer.use_distributed_optimizer)
        return self.stored * ((_BF16 if bf16 else _FP32) + in_fp32 * _FP32)


def model_size(architecture: Architecture) -> ModelSize:
    """The size of a model."""
    moe, hidden, vocabulary = architecture.moe, architecture.hidden_size, architecture.vocab_size
    experts, chosen = (moe.num_experts, moe.topk) if moe else (1, 1)
    # Each of `experts` ranks holds one of them, and the rest of the model.
    tensors = parameters(architecture, Parallel(ep=experts), whole_model(architecture), _TRAITS)
    own = [tensor for tensor in tensors if tensor.name not in (_EMBEDDING, _OUTPUT)]
    main = [tensor for tensor in own if not tensor.name.startswith("mtp.")]
    matrices = [tensor for tensor in own if len(tensor.shape) == 2]
    tables = (len(tensors) - len(own)) * hidden  # parameters for each entry of the vocabulary
    mtp, (key, value) = architecture.mtp_layers, architecture.head_dims
    pair = 2 * architecture.num_attention_heads * (key + value)
    return ModelSize(
        parameters=_count(main, experts) + tables * vocabulary,
        active=_count(main, chosen) + tables * vocabulary,
        mtp=_count(own, experts) - _count(main, experts),
        flops_per_token=2 * (_count(matrices, chosen) + (1 + mtp) * vocabulary * hidden),
        flops_per_pair=(architecture.num_layers + mtp) * pair,
        stored=_count(own, experts) + tables * padded_vocabulary(vocabulary, 1),
    )


def _count(tensors: Iterable[Parameter], experts: int) -> int:
    """The values of these tensors, each expert's in as many experts."""
    return sum(tensor.elements * (experts if tensor.expert else 1) for tensor in tensors)
