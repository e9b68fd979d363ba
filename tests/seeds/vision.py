"""Qwen2.5-VL with transformers' tower, fed as upstream feeds such models on NPUs and as we do.

python -m tests.seeds.vision prints what happened by case as JSON: the error, or what reached the kernel.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from bundle.capabilities.ascend import ASCEND
from bundle.errors import BundleError
from bundle.packing.images import ImageInputs
from bundle.packing.packing import Packing, build_model_and_output_masks
from bundle.planning import build_plan
from bundle.recipe import Recipe, from_mapping
from bundle.recipe.alignment import Alignment
from tests.backends.ascend.contract import registered
from tests.ranks import finish_rank, start_rank
from tests.seeds.mindspeed import Attention as MindSpeedAttention
from tests.vision.cases import CASES, IMAGE

LENGTHS, LONGEST = (9, 4, 6), 9
# An image of two tokens in the first sequence, of one in each of the others; 2 x 2 patches are a token.
GRIDS = np.asarray([[1, 2, 4], [1, 2, 2], [1, 2, 2]])
_SEED = torch.Generator().manual_seed(3)
TOKENS = torch.randint(0, IMAGE, (sum(LENGTHS),), generator=_SEED)
TOKENS[[2, 3, 10, 14]] = IMAGE
PIXELS = torch.randn(int(GRIDS.prod(1).sum()), CASES[0].vision.values_per_patch, generator=_SEED)


def job() -> Recipe:
    """Random weights; what its data would be says nothing here."""
    # Packs are given to the model as well: the patches are those that they need.
    data = {"source": "jsonl", "path": ["none"], "sequence_length": LONGEST, "packed": True}
    return from_mapping(
        {
            "name": "seen",
            "task": "sft",
            "backend": "cpu",
            "model": {"config": CASES[0].config | {"initializer_range": 0.2}, "dtype": "fp32"},
            "data": data | {"tokenizer": "hf:none", "template": "chat"},
            "train": {"steps": 1, "global_batch_size": 1},
            "optimizer": {"warmup_steps": 0},
        }
    )


def images(which: slice = slice(None)) -> ImageInputs:
    """Those of some of the sequences, in whole rows."""
    patches = np.append(0, GRIDS.prod(1).cumsum())
    parts = np.append(0, np.cumsum(LENGTHS))
    first, last, _ = which.indices(len(LENGTHS))
    lengths = LENGTHS[first:last]
    of = ImageInputs.from_sequences(
        PIXELS[patches[first] : patches[last]],
        GRIDS[which],
        TOKENS[parts[first] : parts[last]].numpy(),
        np.asarray(lengths),
        CASES[0].vision,
    )
    return of.pack(Packing.from_lengths(lengths, Alignment("bshd")))


class Vision:
    """Finds its image tokens in whole rows [b, s], as the models of the bridges do, and calls megatron."""

    def __init__(self, language: torch.nn.Module) -> None:
        self.language = language

    def __call__(
        self,
        ids: Tensor,
        mask: Tensor | None,
        *,
        hands_on: bool,
        packing: Packing | None = None,
        seen: ImageInputs | None = None,
    ) -> Tensor:
        """Logits [b, s, v], or of its own pack [1, t, v]; `hands_on`: attention gets the mask as well.

        `seen` are the images of these rows, None: of all sequences.
        """
        from bundle.mcore.packed_sequences import build_packed_seq_params

        seen = images() if seen is None else seen
        embedded, positions = self.language.embedding.word_embeddings(ids), seen.positions
        found = ids == IMAGE
        if mask is not None and mask.dim() == 2:
            found &= mask
        embedded[found], _ = self.language.vision(seen)
        if packing is not None:
            ids, embedded, positions = ids[mask][None], embedded[mask][None], positions[:, mask][:, None]
        logits: Tensor = self.language(
            ids,
            positions,
            mask if hands_on else None,
            decoder_input=embedded.transpose(0, 1).contiguous(),
            packed_seq_params=None if packing is None else build_packed_seq_params(packing),
        )
        return logits


def outcome(act: Callable[[], Any]) -> str:
    """The error, or "computed"."""
    try:
        act()
    except (RuntimeError, BundleError) as error:
        return f"{type(error).__name__}: {error}"
    return "computed"


def upstream(make: Callable[[], Vision]) -> dict[str, str]:
    """What comes of the masks that upstream gives, or gave, to such models on NPUs."""
    rows, pack = (Packing.from_lengths(LENGTHS, Alignment(layout)) for layout in ("bshd", "thd"))
    ids, valid = rows.pack_concatenated_tokens(TOKENS), rows.valid
    future = torch.ones(LONGEST, LONGEST, dtype=torch.bool).triu(1)
    square = ~(valid[:, None, :, None] & valid[:, None, None, :]) | future
    used = make()
    return {
        "bshd valid": outcome(lambda: make()(ids, valid, hands_on=True)),
        "thd valid": outcome(lambda: make()(ids, valid, hands_on=True, packing=pack)),
        "square": outcome(lambda: make()(ids, square, hands_on=True)),
        "none": outcome(lambda: used(ids, None, hands_on=True)),
        "square after none": outcome(lambda: used(ids, square, hands_on=True)),
    }


def far(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, of the largest of theirs."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def ours(model: Vision, reached: list[dict[str, Any]]) -> dict[str, Any]:
    """What the model and the kernel were given in each layout, and how far real tokens are from those of each
    sequence alone, of the largest."""
    each = (images(slice(number, number + 1)) for number in range(len(LENGTHS)))
    rows = zip(TOKENS.split(LENGTHS), each, strict=True)
    alone = torch.cat([model(ids[None], None, hands_on=True, seen=own)[0] for ids, own in rows])
    seen: dict[str, Any] = {}
    for layout in ("bshd", "thd"):
        packing = Packing.from_lengths(LENGTHS, Alignment(layout))
        of = build_model_and_output_masks(packing, ASCEND.find_mask("vlm", layout))
        reached.clear()
        packs = packing if layout == "thd" else None
        logits = model(
            packing.unsharded_bshd_packing.pack_concatenated_tokens(TOKENS),
            of.model,
            hands_on=packs is None,
            packing=packs,
        )
        seen[layout] = {
            "model": None if of.model is None else list(of.model.shape),
            "kernel": reached[0],
            "all layers alike": all(call == reached[0] for call in reached),
            "by mask": far(logits[of.valid], alone),
            "unpacked": far(packing.unpack_gathered_shards(logits), alone),
        }
    valid = Packing.from_lengths(LENGTHS, Alignment("bshd")).valid
    seen["handed on"] = outcome(
        lambda: model(packing.unsharded_bshd_packing.pack_concatenated_tokens(TOKENS), valid, hands_on=True)
    )
    return seen


def main() -> None:
    recipe = job()
    runtime, _ = start_rank(build_plan(recipe, backend="cpu").patch_plan)
    from bundle.backends.ascend import attention
    from bundle.backends.cpu import runtime as specs
    from bundle.mcore import groups
    from bundle.mcore.gpt import build_transformer_config
    from bundle.models import gpt

    registered()
    with runtime.megatron_calls(), torch.no_grad():
        state = groups.create_model_parallel_groups(recipe.parallel, seed=recipe.seed, timeout_seconds=60)

        def make(core: type) -> Vision:
            config = build_transformer_config(recipe, runtime.build_config_options(recipe))
            with patch.object(specs, "CpuCoreAttention", core):
                return Vision(gpt.build_chunks(recipe, config, runtime, state)[0].eval())

        reached: list[dict[str, Any]] = []
        fused = attention.call_fused_attention

        def noted(query: Tensor, key: Tensor, value: Tensor, inputs: Any, **options: Any) -> Tensor:
            given = inputs.to_keywords()
            given["atten_mask"] = None if inputs.atten_mask is None else list(inputs.atten_mask.shape)
            reached.append(given)
            return fused(query, key, value, inputs, **options)

        with patch.object(attention, "call_fused_attention", noted):
            seen = {
                "upstream": upstream(lambda: make(MindSpeedAttention)),
                "ours": ours(make(attention.AscendCoreAttention), reached),
            }
        groups.destroy_model_parallel_groups()
    finish_rank(seen)


if __name__ == "__main__":
    main()
