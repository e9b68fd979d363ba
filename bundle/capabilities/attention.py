"""Attention kernels as data: what each takes, so that a plan and the cpu can refuse what it would refuse."""

from dataclasses import dataclass
from typing import Literal

from bundle.recipe import Recipe

HeadDims = Literal["equal", "v<=qk", "any"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionKernel:
    """One value of the recipe's `attention`, and its contract."""

    name: str  # flash, fused or unfused
    what: str  # the code that runs
    layouts: tuple[str, ...] = ("thd", "bshd")
    head_dims: dict[str, HeadDims]  # by layout: how the head dims of query-key and value may differ
    max_head_dim: int | None = None
    masks: tuple[str, ...] = ("causal", "padding_causal", "padding", "no_mask")
    dtypes: tuple[str, ...] = ("bf16",)
    context_parallel: bool = True
    source: str

    def against(self, recipe: Recipe) -> list[str]:
        """Why this kernel does not take the attention of a job, all reasons; empty if it does."""
        width, value_width = recipe.architecture.head_dims
        layout = "thd" if recipe.data.packed else "bshd"
        if layout == "thd" and self.head_dims.get(layout) == "equal":
            value_width = width  # megatron-core pads the values from 0.18, and a patch does before
        reasons = self.refusals(layout=layout, mask="causal", qk_head_dim=width, v_head_dim=value_width)
        found = [f"{why} ({self.source})" for why in reasons]
        if recipe.model.dtype not in self.dtypes:
            offered = ", ".join(self.dtypes)
            found.append(f"{self.name} takes {offered}, and model.dtype is {recipe.model.dtype}")
        if recipe.parallel.cp > 1 and not self.context_parallel:
            found.append(f"{self.name} has no context parallelism, and parallel.cp is {recipe.parallel.cp}")
        return found

    def refusals(self, *, layout: str, mask: str, qk_head_dim: int, v_head_dim: int) -> tuple[str, ...]:
        """Why this kernel does not take such an attention, all reasons; empty if it does."""
        dims = f"query and key heads of {qk_head_dim} and value heads of {v_head_dim}"
        if layout not in self.layouts:
            return (
                f"{self.name} attention does not take {layout} input; it takes {' and '.join(self.layouts)}",
            )
        found = []
        if mask not in self.masks:
            found.append(f"{self.name} attention takes no {mask} mask; it takes {', '.join(self.masks)}")
        rule = self.head_dims[layout]
        if (rule == "equal" and qk_head_dim != v_head_dim) or (rule == "v<=qk" and v_head_dim > qk_head_dim):
            need = "of one size" if rule == "equal" else "with values no wider than keys"
            found.append(f"{self.name} attention wants {layout} heads {need}, but got {dims}")
        if self.max_head_dim is not None and max(qk_head_dim, v_head_dim) > self.max_head_dim:
            found.append(f"{self.name} attention takes heads up to {self.max_head_dim}, but got {dims}")
        return tuple(found)


FLASH = AttentionKernel(
    name="flash",
    what="flash-attention 2, through Transformer Engine",
    head_dims={"thd": "equal", "bshd": "any"},
    max_head_dim=256,
    source="flash-attention's README (up to 256); Megatron-LM#3003, TransformerEngine#2629 (thd: one size)",
)
FUSED = AttentionKernel(
    name="fused",
    what="cuDNN's attention, through Transformer Engine",
    head_dims={"thd": "any", "bshd": "any"},
    max_head_dim=256,
    source="run on an H200, thd: 192/128, 96/64, 256/256; 576/512 is given to the unfused kernel instead",
)
UNFUSED = AttentionKernel(
    name="unfused",
    what="matrix products and a softmax, through Transformer Engine",
    head_dims={"thd": "any", "bshd": "any"},
    masks=("causal", "padding_causal", "padding", "no_mask", "arbitrary"),
    dtypes=("bf16", "fp32"),
    context_parallel=False,
    source="Transformer Engine's UnfusedDotProductAttention: alone of the three it takes arbitrary masks, and"
    " alone it knows no context parallelism",
)
