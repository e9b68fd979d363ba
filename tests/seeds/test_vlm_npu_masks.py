"""Vision-language models on NPUs: which mask reaches the kernel, and that post-processing keeps its own.

verl #5904 (2026-04-08) gave None, #5942 took that back, #5945 gave it again for bshd; since #7372 thd models
get [b, s] on NPUs too. MindSpeed (core_r0.16.0) hands every mask on, and a call's mode stays for the next.
All on the real megatron-core and transformers' tower of Qwen2.5-VL; the operator is emulated.
"""

import json

import pytest


@pytest.fixture(scope="module")
def seen(core):
    pytest.importorskip("transformers")
    return json.loads(core.world.run("tests.seeds.vision", 1)[0].splitlines()[-1])


@pytest.mark.world
def test_upstream_a_mask_of_valid_tokens_reaches_the_kernel_and_fails(seen):
    for layout, shapes in (("bshd", ["[3, 9]"]), ("thd", ["[9, 9]", "[3, 9]"])):
        refusal = seen["upstream"][f"{layout} valid"]
        assert all(part in refusal for part in ("atten_mask", *shapes))


@pytest.mark.world
def test_upstream_the_mode_of_one_call_breaks_the_next(seen):
    assert seen["upstream"]["square"] == seen["upstream"]["none"] == "computed"
    assert "sparse_mode 2" in seen["upstream"]["square after none"]


@pytest.mark.world
@pytest.mark.parametrize(("layout", "model", "ends"), [("bshd", None, None), ("thd", [3, 9], [9, 13, 19])])
def test_the_kernel_gets_the_compressed_mask_and_post_processing_its_own(seen, layout, model, ends):
    ours = seen["ours"][layout]
    assert ours["model"] == model
    assert ours["kernel"]["atten_mask"] == [2048, 2048] and ours["kernel"]["sparse_mode"] == 3
    assert ours["kernel"]["actual_seq_qlen"] == ours["kernel"]["actual_seq_kvlen"] == ends
    assert ours["all layers alike"]
    # Real tokens come out as if every sequence were alone: picked by the mask, or unpacked.
    assert ours["by mask"] < 1e-5 and ours["unpacked"] < 1e-5


@pytest.mark.world
def test_a_model_that_hands_its_mask_on_is_told_at_the_border(seen):
    assert seen["ours"]["handed on"].startswith("JobFailed")
    assert "kernel" in seen["ours"]["handed on"]
