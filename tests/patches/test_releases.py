"""The checked-in list against the releases themselves, and what is known of each defect."""

from pathlib import Path

import pytest
from packaging.version import Version

from bundle.environment import packages
from bundle.patches.catalogue import PATCHES, TRAPS
from bundle.patches.entry import Presence
from bundle.patches.megatron_core import load_review_table, parse_releases_json, resolve_core_path_or_version
from tools.patches import page, review

RELEASES = [
    *("0.12.0", "0.12.1", "0.12.2", "0.12.3", "0.13.0", "0.13.1", "0.14.0"),
    *("0.15.0", "0.15.1", "0.15.2", "0.15.3", "0.16.0", "0.16.1", "0.17.0", "0.17.1"),
    *("0.18.0", "0.18.2", "0.19.0", "0.19.2"),
]
# (first, last) release with the defect; several stretches where it came back
PRESENT = {
    "moe-tensor-without-expert-parallel": [("0.12.0", "0.18.2")],
    "mtp-packed": [("0.12.0", "0.15.3")],
    "mtp-tensor-parallel": [("0.12.0", "0.12.3")],
    "interleaved-batched-exchange": [("0.12.0", "0.19.2")],
    "overlap-tied-mtp": [("0.12.0", "0.15.3")],
    "tied-mtp-checkpoint": [("0.12.0", "0.19.2")],
    "balancing-of-prompts": [("0.12.0", "0.19.2")],
    "balancing-of-packs": [("0.12.0", "0.19.2")],
    "balancing-of-padding": [("0.12.0", "0.15.3")],
    "cuda-attention-host-reads": [("0.12.0", "0.18.2")],
    "packed-rotary-host-reads": [("0.12.0", "0.19.2")],
    "mla-packed-qkv": [("0.12.0", "0.13.1")],
    "mla-thd-value-padding": [("0.12.0", "0.17.1")],
    "mla-uncompressed-query-norm": [("0.19.0", "0.19.2")],
    "mla-rotary-key-gradient": [("0.14.0", "0.19.2")],
    "mla-query-norm-gradient": [("0.14.0", "0.19.2")],
    "mla-tensor-without-sequence-parallel": [("0.12.0", "0.13.1")],
    "mla-without-te-linear": [("0.14.0", "0.19.2")],
    "mtp-context-parallel-roll": [("0.12.0", "0.13.1")],
    "mtp-packed-roll-boundaries": [("0.16.0", "0.19.2")],
    "mtp-loss-context-parallel-normalisation": [("0.17.0", "0.19.2")],
    "mtp-loss-context-parallel-count": [("0.14.0", "0.16.1")],
    "mtp-per-token-weight": [("0.12.0", "0.16.1")],
    "mtp-zero-layers": [("0.16.0", "0.16.1")],
    "mtp-without-labels": [("0.12.0", "0.18.2")],
    "mtp-labels-from-input": [("0.19.0", "0.19.2")],
    "mtp-packed-full-recompute": [("0.16.0", "0.17.1")],
    "mtp-full-recompute": [("0.18.0", "0.18.2")],
    "recompute-reclaim": [("0.12.0", "0.19.2")],
    "sort-of-sorted-tokens": [("0.13.0", "0.19.2")],
    "balancing-per-token-ranks": [("0.12.0", "0.18.2")],
    "balancing-mean-context-parallel": [("0.12.0", "0.15.3")],
    "balancing-per-token-rows": [("0.16.0", "0.18.2")],
    "expert-bias-counts": [("0.12.0", "0.19.2")],
    "router-replay": [("0.12.0", "0.15.3")],
    "router-replay-by-layer": [("0.16.0", "0.19.2")],
    "native-replay-recompute": [("0.16.0", "0.19.2")],
    "per-token-loss-context-parallel": [("0.12.0", "0.12.3")],
    "frozen-weight-product": [("0.12.0", "0.18.2")],
    "shared-embedding-bucket": [("0.12.0", "0.12.3")],
    "cuda-norm-of-whole-weights": [("0.12.0", "0.16.1")],
    "cuda-norm-of-expert-weights": [("0.12.0", "0.18.2")],
    "dist-checkpoint-serialization": [("0.12.0", "0.12.3")],
    "dist-checkpoint-numpy-product": [("0.12.0", "0.15.3")],
    "restricted-unpickle": [("0.12.0", "0.13.1"), ("0.17.0", "0.17.0")],
    "cpu-moe-splits-on-host": [("0.12.0", "0.19.2")],
    "router-without-te-gemm": [("0.13.0", "0.16.1")],
    "optimizer-without-fp8-quantize": [("0.12.0", "0.12.3")],
    "offload-stale-weights": [("0.12.0", "0.19.2")],
    "offload-resume-fp32": [("0.12.0", "0.19.2")],
    "attention-sinks-norm": [("0.15.0", "0.19.2")],
    "output-gate-of-shared-groups": [("0.16.0", "0.16.1")],
    "gated-delta-net-packed": [("0.16.0", "0.17.1")],
    "gated-delta-norm-gradient": [("0.16.0", "0.19.2")],
    "cross-attention-groups": [("0.13.0", "0.19.2")],
    "mrope-packed": [("0.12.0", "0.19.2")],
    "mtp-whole-embeddings": [("0.12.0", "0.19.2")],
    "optimizer-checkpoint-default": [("0.16.0", "0.19.2")],
    "dp-reshardable-steps": [("0.16.0", "0.19.2")],
    "optimizer-gather-memory": [("0.15.0", "0.19.2")],
    "padding-mask-expert-bias": [("0.16.0", "0.19.2")],
    "padding-mask-own-count": [("0.16.0", "0.19.2")],
    "global-aux-loss-tokens": [("0.15.0", "0.19.2")],
    "label-smoothing-over-ranks": [("0.12.0", "0.19.2")],
    "loss-of-gathered-logits": [("0.12.0", "0.19.2")],
    "mtp-recompute-fp8": [("0.14.0", "0.17.1")],
    "mtp-recompute-groups": [("0.14.0", "0.19.2")],
    "padding-mask-stages": [("0.16.0", "0.19.2")],
    "llava-groups": [("0.14.0", "0.19.2")],
    "fsdp-checkpoint-stages": [("0.14.0", "0.19.2")],
    "mxfp8-gather-of-experts": [("0.13.0", "0.17.1")],
}


def has(patch_id: str, release: str) -> bool:
    version = Version(release)
    return any(Version(first) <= version <= Version(last) for first, last in PRESENT[patch_id])


def test_the_list_has_every_release():
    assert list(load_review_table().references) == RELEASES


@pytest.mark.parametrize("entry", review.ENTRIES, ids=lambda entry: entry.id)
def test_each_defect_is_where_it_is_known_to_be(entry):
    found = {release: load_review_table().find_presence(entry.id, release) for release in RELEASES}
    assert found == {release: Presence.from_bool(has(entry.id, release)) for release in RELEASES}


@pytest.mark.parametrize("entry", review.ENTRIES, ids=lambda entry: entry.id)
def test_the_numbers_say_the_same_of_released_versions(entry):
    for release in RELEASES:
        assert packages.is_base_version_within(release, entry.range) == has(entry.id, release), release


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_a_defect_ends_where_it_is_said_to_be_fixed(patch):
    if (fixed := page.fixed_in(patch)) is not None:
        assert not has(patch.id, fixed)
        assert has(patch.id, max((r for r in RELEASES if Version(r) < Version(fixed)), key=Version))
    else:
        assert has(patch.id, RELEASES[-1])


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_where_the_defect_is_the_targets_are(patch):
    for release in RELEASES:
        there = [
            load_review_table().find_fingerprint(r.target, release, by_signature=r.by_signature) is not None
            for r in patch.replacements
        ]
        wanted = [not r.optional for r in patch.replacements]
        if has(patch.id, release):
            assert any(there) and all(t or not w for t, w in zip(there, wanted, strict=True)), release


def test_the_list_has_nothing_that_is_no_longer_declared():
    by_code, by_signature = review.declared()
    assert set(load_review_table().targets) <= by_code
    assert set(load_review_table().signatures) <= by_signature
    assert set(load_review_table().defects) == {entry.id for entry in review.ENTRIES}


def test_the_list_is_what_the_releases_say(release_trees: dict[str, Path]):
    read, expected = review.read(release_trees), review.merged([load_review_table()], release_trees)
    assert (read.targets, read.signatures) == (expected.targets, expected.signatures)
    assert read.defects == expected.defects
    # with fewer releases at hand fewer modules are asked for
    assert read.modules == {name: expected.modules[name] for name in read.modules}


def test_a_release_is_recognised_by_its_files(release_trees: dict[str, Path]):
    for release, root in release_trees.items():
        subject = resolve_core_path_or_version(str(root), load_review_table())
        assert subject.version == release
        # 0.15.0 and its patch releases differ in nothing that matters
        assert subject.reference is not None
        table, like = load_review_table(), subject.reference
        assert all(
            table.find_fingerprint(t, release) == table.find_fingerprint(t, like) for t in table.targets
        )


def test_the_file_is_written_as_it_is_read(tmp_path: Path):
    review.record(load_review_table(), tmp_path / "releases.json")
    assert parse_releases_json((tmp_path / "releases.json").read_text()) == load_review_table()


def test_a_locked_tree_joins_the_list_and_replaces_itself(tmp_path: Path):
    table = load_review_table()
    one = review.read({})
    assert review.combined(table, one) == table


def test_no_patch_outlives_its_defect():
    oldest = Version(load_review_table().references[0])
    for patch in PATCHES:
        fixed = page.fixed_in(patch)
        assert fixed is None or Version(fixed) > oldest, f"{patch.id} can be deleted"


def test_ids_are_unique_and_every_patch_says_why():
    ids = [patch.id for patch in PATCHES]
    assert len(set(ids)) == len(ids)
    for patch in PATCHES:
        assert patch.why and patch.upstream and patch.evidence_targets and patch.replacements, patch.id
        assert patch.assumes, f"{patch.id}: what does it assume of its caller? NOTHING is an answer"
    for trap in TRAPS:
        assert trap.why and trap.cause and trap.instead and trap.evidence_targets, trap.id
