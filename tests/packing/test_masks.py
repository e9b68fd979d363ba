"""The masks of a micro-batch by backend: what the model is given, and what is left for post-processing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bundle.capabilities.ascend import ASCEND
from bundle.capabilities.cpu import CPU
from bundle.capabilities.cuda import CUDA
from bundle.packing.packing import Packing, build_model_and_output_masks
from bundle.recipe.alignment import Alignment
from tests.packing.strategies import ALIGNMENTS

LENGTHS = [5, 3, 9]


@pytest.mark.parametrize("layout", ["thd", "bshd"])
@pytest.mark.parametrize("backend", [CPU, CUDA, ASCEND], ids=lambda backend: backend.backend)
def test_by_backend(backend, layout):
    packing = Packing.from_lengths(LENGTHS, Alignment(layout, scaling="blockwise"))
    text, vision = (
        build_model_and_output_masks(packing, backend.find_mask(model, layout)) for model in ("text", "vlm")
    )
    assert text.model is None
    assert text.valid is packing.valid and vision.valid is packing.valid
    if (backend, layout) == (ASCEND, "bshd"):
        assert vision.model is None
    else:
        assert vision.model is not None and vision.model.sum(1).tolist() == LENGTHS


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), ALIGNMENTS, st.data())
def test_ids_and_mask_of_a_model_that_packs_by_itself(lengths, alignment, data):
    rank = data.draw(st.integers(0, alignment.cp - 1))
    packing = Packing.from_lengths(lengths, alignment, rank=rank)
    given_mask = build_model_and_output_masks(packing, CPU.find_mask("vlm", alignment.layout)).model
    ids = packing.unsharded_bshd_packing.pack_concatenated_tokens(torch.arange(sum(lengths)), fill=-1)
    assert given_mask is not None and given_mask.shape == ids.shape and given_mask.dtype == torch.bool
    assert torch.equal(given_mask, ids >= 0)
    assert torch.equal(ids[given_mask], torch.arange(sum(lengths)))
    if alignment.layout == "bshd":
        assert ids.shape == (len(lengths), packing.local_shape[1] * alignment.cp)
