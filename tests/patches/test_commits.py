"""Code that was read in a commit counts as reviewed, and only that code."""

from bundle.patches.definitions import Definitions
from bundle.patches.entry import Seam
from bundle.patches.megatron_core import DefectReader, load_commits_by_target_fingerprint, load_review_table
from tests.patches.trees import Release, edited
from tools.patches import review

ROUTER = "transformer.moe.router"
ROUTING = "megatron.core.transformer.moe.router:TopKRouter.routing"
COUNTING = """        # Prevent extra local tokens accumulation on evaluation or activation recomputation
        if self.enable_expert_bias and torch.is_grad_enabled():
            with torch.no_grad():
                self.local_tokens_per_expert += routing_map.sum(dim=0)

        return probs"""
METHOD = "        self._apply_expert_bias(routing_map)\n        return probs"


def reviewed(definitions: Definitions) -> tuple[str, ...]:
    found = DefectReader(None, definitions, load_review_table()).read_seam_fingerprints(
        Seam(id="s", targets=(ROUTING,), use="", why="")
    )
    assert found is not None
    return found.references[ROUTING]


def test_what_was_read_in_a_commit_is_reviewed_wherever_it_stands(release: Release):
    later = edited(release("0.15.3"), {ROUTER: [(COUNTING, METHOD)]})
    assert reviewed(later) == ("fa384d200e",)
    assert "0.15.3" in reviewed(edited(release("0.15.3"), {}))


def test_anything_else_is_not(release: Release):
    other = METHOD.replace("routing_map", "probs")
    assert reviewed(edited(release("0.15.3"), {ROUTER: [(COUNTING, other)]})) == ()


def test_only_targets_are_listed_and_nothing_that_a_release_has():
    by_code, by_signature = review.declared()
    for target, known in load_commits_by_target_fingerprint().items():
        assert target in by_code | by_signature
        for fingerprint, said in known.items():
            commit, _, differs = said.partition(" ")
            assert not load_review_table().find_reviewed_versions(
                target, fingerprint, by_signature=target in by_signature
            )
            assert len(commit) == 10 and differs
