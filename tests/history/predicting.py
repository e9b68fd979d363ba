"""A program that calls a model as slime and miles do: no labels, and those of prediction in mtp_kwargs.

Prints the norm of the gradients of the prediction layers, and of all others.
"""

import inspect
import math
import os
import sys
import tempfile

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.transformer import TransformerConfig

TOKENS, VOCABULARY = 32, 64
if "mtp_kwargs" not in inspect.signature(GPTModel.forward).parameters:
    sys.exit("GPTModel.forward takes no mtp_kwargs")
store = os.path.join(tempfile.mkdtemp(), "store")  # noqa: PTH118
torch.distributed.init_process_group("nccl", f"file://{store}", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
config = TransformerConfig(
    num_layers=1,
    hidden_size=32,
    num_attention_heads=2,
    use_cpu_initialization=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    mtp_num_layers=1,
    mtp_loss_scaling_factor=1.0,
)
layer = get_gpt_layer_local_spec()
torch.manual_seed(1)
model = GPTModel(
    config,
    layer,
    VOCABULARY,
    TOKENS,
    position_embedding_type="rope",
    mtp_block_spec=get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False),
)
ids = torch.randint(VOCABULARY, (1, TOKENS))
mask, positions = (torch.arange(TOKENS) >= 20).float()[None], torch.arange(TOKENS)[None]
logits = model(ids, positions, None, labels=None, loss_mask=mask, mtp_kwargs={"mtp_labels": ids})
logits.float().log_softmax(-1)[..., 0].mean().backward()


def norm(of_prediction: bool) -> float:
    """The norm of the gradients of the weights that are, or are not, those of the prediction layers."""
    weights = [w for name, w in model.named_parameters() if name.startswith("mtp.") is of_prediction]
    squares = sum(float(w.grad.square().sum()) for w in weights if w.grad is not None)
    return math.sqrt(squares)


print("norms", norm(True), norm(False))
