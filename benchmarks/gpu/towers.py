"""What a vision tower costs on a GPU: attention in one call of a layer, beside one for each image or window.

python -m torch.distributed.run --nproc-per-node 1 -m benchmarks.gpu.towers [--where] [--set KEY=VALUE...]

One engine (benchmarks/gpu/seeing.yaml) takes steps over the same patches as a few large images and as many
small ones, in packs, with the backend's attention; another has torch attend image by image. Ends with 1 where
the two do not compute the same, where many small images make the host wait more often than few large ones, or
where the backend's attention takes longer than torch's. `--where` names the lines that wait.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.packing import MICRO_BATCHES, WAITS, Steps, waiting_lines
from benchmarks.gpu.rank import grouped, prepared
from bundle.planning import build_plan
from bundle.recipe import load

RECIPE = str(Path(__file__).parent / "seeing.yaml")
PATCHES, FEW, MANY = 16384, 4, 64  # of a micro-batch, in so many images of the same square size
TEXT = 32  # tokens behind each image
PAIRS, STEPS = 2, 2  # torch takes seconds for each
NEAR = {"cpu": 1e-5, "cuda": 0.05}  # of the largest number: fp32, and bf16 after 32 layers


class Seeing(Steps):
    """Steps of one engine on drawn images, each with a text behind it, in packs."""

    def micro_batches(self, lengths: Sequence[int], *, packed: bool) -> list[Any]:
        """A step's micro-batches of sequences whose images have these numbers of patches."""
        from bundle.engine.microbatch import from_packing
        from bundle.packing.packing import Packing

        assert packed
        architecture = self.recipe.architecture
        vision = architecture.vision
        generator = torch.Generator().manual_seed(1)
        sides = [round(patches**0.5) for patches in lengths]
        grids = np.asarray([[1, side, side] for side in sides])
        shown = grids.prod(1) // vision.merge_size**2
        made = []
        for _ in range(MICRO_BATCHES):
            total = int(shown.sum()) + TEXT * len(shown)
            ids = torch.randint(0, vision.image_token, (total + 1,), generator=generator)
            at = 0
            for count in shown.tolist():
                ids[at : at + count] = vision.image_token
                at += count + TEXT
            labels, ids = ids[1:], ids[:-1]
            pixels = torch.randn(int(grids.prod(1).sum()), vision.values_per_patch, generator=generator)
            own = np.asarray(shown + TEXT)
            given = self.images(pixels, grids, ids.numpy(), own)
            packing = Packing.from_lengths(own.tolist(), self.recipe.alignment, device=self.device)
            mask = (labels != vision.image_token).float()
            ids, labels, mask = (x.to(self.device, non_blocking=True) for x in (ids, labels, mask))
            made.append(from_packing(ids, labels, mask, packing, mtp_layers=0, images=given))
        return made

    def images(self, pixels: torch.Tensor, grids: Any, ids: Any, lengths: Any) -> Any:
        """As the engine takes them, on its device."""
        from bundle.packing.images import ImageInputs

        return ImageInputs.from_sequences(pixels, grids, ids, lengths, self.recipe.architecture.vision).to(
            self.device
        )

    def tower(self, lengths: Sequence[int]) -> list[torch.Tensor]:
        """What the tower gives for a micro-batch's images, and its gradient for the first weights."""
        vision = self.engine.models[0].vision
        (given, *_) = self.micro_batches(lengths, packed=True)
        out, _ = vision(given.images)
        weights = [vision.tower.patch_embed.proj.weight, vision.tower.blocks[-1].attn.qkv.weight]
        return [out.detach(), *torch.autograd.grad((out * out.detach().sin()).sum(), weights)]


def apart(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """The largest difference, relative to the largest number of its tensor."""
    return max(
        float((a.float() - b.float()).abs().max() / b.float().abs().max())
        for a, b in zip(one, other, strict=True)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", nargs="*", default=[], help="changes of the recipe")
    parser.add_argument("--patches", type=int, default=PATCHES, help="of a micro-batch")
    parser.add_argument("--where", action="store_true", help="name the lines that wait")
    options = parser.parse_args()
    recipe = load(RECIPE, tuple(options.set))
    sizes = {count: [options.patches // count] * count for count in (FEW, MANY)}
    with prepared(build_plan(recipe, per_node=1)) as (runtime, device, _):
        state = grouped(recipe, runtime)
        packed = Seeing(recipe, runtime, state, device)
        runtime.noncausal_packed_attention = None
        single = Seeing(recipe, runtime, state, device)
        single.engine.models[0].vision.load_state_dict(packed.engine.models[0].vision.state_dict())
        wrong = False
        for count, lengths in sizes.items():
            far = apart(packed.tower(lengths), single.tower(lengths))
            wrong |= not far <= NEAR[device.type]
            print(f"{count} images: outputs and gradients within {far:.1e} of torch's", flush=True)
        waits = {count: packed.waits(lengths, packed=True) for count, lengths in sizes.items()}
        wrong |= any(waits[MANY][name] > waits[FEW][name] for name in WAITS)
        print(*(f"{count} images: {dict(found)}" for count, found in waits.items()), sep="\n", flush=True)
        if device.type != "cuda":
            return int(wrong)
        if options.where:
            with waiting_lines() as lines:
                packed.run(sizes[MANY], packed=True)
            print(*(f"  {n:5d} {line}" for line, n in lines.most_common(12)), sep="\n")
        for count, lengths in sizes.items():
            pairs = [
                [each.milliseconds(lengths, packed=True, steps=STEPS) for each in (packed, single)]
                for _ in range(PAIRS + 1)
            ][1:]
            ratio = median(ours / theirs for ours, theirs in pairs)
            wrong |= ratio > 1
            print(f"{count} images: {ratio:.3f} of the time of torch's, ms of a step:", end=" ")
            print(*(f"{ours:.0f}/{theirs:.0f}" for ours, theirs in pairs), flush=True)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
