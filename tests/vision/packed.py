"""A backend's attention of packed sequences in whole vision towers, beside torch's, image by image.

python -m tests.vision.packed does so with the transformers that is installed: its version, each tower.
"""

from collections.abc import Callable

import torch

from bundle.architectures import from_config
from bundle.models.vision import VisionTower
from bundle.packing.images import ImageInputs
from tests.backends.cpu import reference
from tests.vision.cases import CASES, Case

TOWERS = tuple(case for case in CASES if "Hub" in case.name)
GRIDS = torch.tensor([[1, 8, 4], [1, 4, 4], [1, 2, 6]])
# What a call covers of them: each image, or windows of 4 x 4 patches.
IMAGES, WINDOWS = (32, 48, 60), (16, 32, 48, 56, 60)


def agrees(case: Case, attention: Callable[..., torch.Tensor]) -> None:
    """A tower's outputs and gradients are those of transformers', which counts and attends by itself."""
    architecture, nowhere = from_config(case.config), torch.zeros(0)
    torch.manual_seed(2)
    pixels = torch.randn(int(GRIDS.prod(1).sum()), case.vision.values_per_patch)
    plain, ours = (VisionTower(architecture, torch.float32, of) for of in (None, attention))
    ours.load_state_dict(plain.state_dict())
    plain.__dict__["_prepare_inputs"] = lambda *_: {}
    found = []
    for tower in (plain, ours):
        out, behind = tower(ImageInputs(pixels, GRIDS, nowhere, nowhere))
        total = sum((x * x.detach().sin()).sum() for x in (out, *behind))
        found.append((out, *behind, *torch.autograd.grad(total, list(tower.parameters()))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def ends(case: Case) -> list[tuple[int, ...]]:
    """Where the sequences of each layer's call end."""
    whole = case.vision.full_layers if case.family == "qwen2_5_vl" else range(case.vision.num_layers)
    return [IMAGES if layer in whole else WINDOWS for layer in range(case.vision.num_layers)]


def attended(query, key, value, boundaries, *, scale):
    """The reference, as a backend's attention is called."""
    lengths = torch.tensor(boundaries).diff().tolist()
    return reference.packed(query, key, value, lengths, lengths, scale=scale, causal=False)


if __name__ == "__main__":
    import transformers

    print(transformers.__version__)
    for each in TOWERS:
        agrees(each, attended)
        print(each.family)
