"""The gated delta net, the linear attention of Qwen3-Next and Qwen3.5."""

import ast
from typing import TYPE_CHECKING

from bundle.patches.entry import NOTHING, Patch, Presence, Replacement

if TYPE_CHECKING:
    from bundle.patches.definitions import Evidence

_LAYER = "megatron.core.ssm.gated_delta_net:GatedDeltaNet"
_INIT = f"{_LAYER}.__init__"
_SUMS = "megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads"
FORWARD = f"{_LAYER}.forward"


def _summed_by_sequence_alone(source: "Evidence") -> Presence:
    """Whether the norm behind the heads is summed over the ranks only if they share out the sequence."""
    if not source.has_module(_INIT):
        return Presence.ABSENT  # there is no such layer
    init, sums = source[_INIT], source[_SUMS]
    if init is None or sums is None:
        return Presence.UNKNOWN
    mentions = [node for node in init.walk() if isinstance(node, ast.Attribute) and node.attr == "out_norm"]
    built = init.has("self.out_norm = build_module(submodules.out_norm, config=_, hidden_size=_, eps=_)")
    by_sequence = sums.has("config.sequence_parallel and getattr(param, 'sequence_parallel', False)")
    by_name = any(isinstance(node, ast.Constant) and "out_norm" in str(node.value) for node in sums.walk())
    if not built or len(mentions) != 2 or not by_sequence or by_name:  # the attribute, and the spec's
        return Presence.UNKNOWN
    return Presence.PRESENT


PATCHES = (
    Patch(
        id="gated-delta-norm-gradient",
        replacements=(Replacement(_INIT, "bundle.wrappers.attention:sum_output_norm", by_signature=True),),
        why=(
            "Copies of one weight drift apart: under tensor without sequence parallelism the gradient of the "
            "gated delta net's output norm, which all heads share, is that of each rank's own heads."
        ),
        silent=True,
        upstream="NVIDIA/Megatron-LM#7452 (finding 11)",
        range=">=0.16",
        when=frozenset({"gated-delta-net", "tp"}),
        assumes=NOTHING,
        evidence=(_INIT, _SUMS),
        defect=_summed_by_sequence_alone,
    ),
)
