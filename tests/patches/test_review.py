"""What a changed body and a changed signature mean: for wrappers that call through, and for others."""

from pathlib import Path

import pytest

from bundle.environment.packages import detect
from bundle.patches import PatchAction
from bundle.patches.catalogue import PATCHES
from bundle.patches.megatron_core import load_review_table, resolve_core_path_or_version
from bundle.patches.plan import survey_patches
from tests.patches.trees import Release, copied

GPT, ROUTER = "models/gpt/gpt_model.py", "transformer/moe/router.py"
BY_SIGNATURE, BY_CODE = "mtp-without-labels", "router-replay"


def action(tree: Path, patch_id: str) -> tuple[PatchAction, str]:
    rows = {
        decision.id: decision
        for decision in survey_patches(
            resolve_core_path_or_version(str(tree), load_review_table()), load_review_table(), detect()
        ).decisions
    }
    return rows[patch_id].action, rows[patch_id].reason


OPTIONAL = "runtime_gather_output: Optional[bool] = None,"


@pytest.mark.parametrize(
    ("version", "file", "edit", "patch_id", "expected"),
    [
        ("0.16.1", GPT, (OPTIONAL, "runtime_gather_output: bool = None,"), BY_SIGNATURE, PatchAction.APPLY),
        ("0.16.1", GPT, ("self.decoder(", "1 * self.decoder("), BY_SIGNATURE, PatchAction.APPLY),
        ("0.16.1", GPT, ("labels: Tensor = None,", "labels: Tensor = 0,"), BY_SIGNATURE, PatchAction.DRIFT),
        ("0.15.3", ROUTER, ("def routing(self, logits", "def routing(self, log"), BY_CODE, PatchAction.DRIFT),
        ("0.15.3", ROUTER, ("# Apply Z-Loss", "logits = 1 * logits"), BY_CODE, PatchAction.DRIFT),
    ],
)
def test_a_changed_target(
    release: Release,
    tmp_path: Path,
    version: str,
    file: str,
    edit: tuple[str, str],
    patch_id: str,
    expected: PatchAction,
):
    found, reason = action(copied(release(version), tmp_path, {file: edit}), patch_id)
    assert found is expected, reason


def test_what_depends_on_the_body_says_so():
    by_code = {r.target.rpartition(":")[2] for p in PATCHES for r in p.replacements if not r.by_signature}
    depending = {"roll_tensor", "process_mtp_loss", "TopKRouter.routing", "RouterReplay.get_replay_topk"}
    depending |= {"MLASelfAttention.get_query_key_value_tensors", "_ParamAndGradBuffer.__init__"}
    assert depending <= by_code
