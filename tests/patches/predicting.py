"""A program of somebody else: megatron-core and a loop of its own, on the cpu; prints the gradients' norm.

`predicting.py STORE`, as a rank of $WORLD_SIZE that are all context parallel. The model has no attention, for
which megatron-core has nothing on a cpu under context parallelism: embedding, MLP, a prediction layer, loss.

`predicting.py STORE apart` calls it as slime and miles do, with no labels, and those of prediction in
mtp_kwargs, with attention, under `bundle.patched --backend cpu`; it prints the norm of the gradients of the
prediction layers, and of all others.
"""

import inspect
import os
import sys

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

TOKENS, VOCABULARY = 64, 128
torch.cuda.current_device = lambda: torch.device("cpu")  # where megatron puts what it exchanges, and its log
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.distributed.init_process_group("gloo", f"file://{sys.argv[1]}", rank=rank, world_size=size)
parallel_state.initialize_model_parallel(context_parallel_size=size)
config = TransformerConfig(
    num_layers=1,
    hidden_size=32,
    num_attention_heads=2,
    use_cpu_initialization=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    context_parallel_size=size,
    mtp_num_layers=1,
    mtp_loss_scaling_factor=1.0,
)
layer = get_gpt_layer_local_spec()
apart = "apart" in sys.argv
if not apart:
    layer.submodules.self_attention = ModuleSpec(IdentityOp, params={"attn_mask_type": AttnMaskType.causal})
    layer.submodules.self_attn_bda = IdentityFuncOp
torch.manual_seed(1)
model = GPTModel(
    config,
    layer,
    VOCABULARY,
    TOKENS,
    position_embedding_type="rope" if apart else "none",
    mtp_block_spec=get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False),
)
ids = torch.randint(VOCABULARY, (1, TOKENS))
labels = torch.randint(VOCABULARY, (1, TOKENS))
mask = (torch.arange(TOKENS) >= 40).float()[None]  # the learned tokens, unevenly over the ranks


def part(whole: torch.Tensor) -> torch.Tensor:
    """This rank's two chunks of the sequence, as megatron cuts it for context parallel."""
    chunks = whole.chunk(2 * size, dim=1)
    return torch.cat([chunks[rank], chunks[-1 - rank]], dim=1)


positions = part(torch.arange(TOKENS)[None])
if apart and "mtp_kwargs" not in inspect.signature(GPTModel.forward).parameters:
    sys.exit("GPTModel.forward takes no mtp_kwargs")
told = {"labels": None, "mtp_kwargs": {"mtp_labels": part(labels)}} if apart else {"labels": part(labels)}
losses = model(part(ids), positions, None, loss_mask=part(mask), **told)
if apart:
    losses.float().log_softmax(-1)[..., 0].mean().backward()
else:
    # The mean over all tokens, and gradients averaged over the ranks: each has `size` times its own share.
    (losses * part(mask)).sum().mul(size / mask.sum()).backward()

squares = {True: 0.0, False: 0.0}  # of the prediction layers, and of all others
for name, weight in model.named_parameters():
    if weight.grad is not None:
        torch.distributed.all_reduce(weight.grad)
        squares[name.startswith("mtp.")] += float((weight.grad / size).square().sum())
if apart:
    print("norms", squares[True] ** 0.5, squares[False] ** 0.5)
else:
    print("norm", sum(squares.values()) ** 0.5)
