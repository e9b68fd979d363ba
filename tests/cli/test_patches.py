"""`mcore-bundle patches`, as the issue and its users call it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bundle.environment import BACKENDS
from tests.command import run_bundle
from tests.patches.trees import Release, copied, renumbered

FIELDS = {"assumes", "id", "decision", "reason", "range", "evidence", "proven", "target", "fingerprint"}
MLA = "transformer/multi_latent_attention.py"
RENAMED = {MLA: ("class MultiLatentAttention(Attention):", "class LatentAttention(Attention):")}
VALUE_PADDING = "mla-thd-value-padding"


def run(*args: str, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    return run_bundle("patches", *args, code=code, timeout=60, environment=environ)


def decisions(mcore: str | Path, *args: str, code: int = 0) -> dict[str, dict[str, Any]]:
    document = json.loads(run("plan", "--mcore", str(mcore), "--json", *args, code=code).stdout)
    assert document["schema"] == 1 and set(document) == {"schema", "mcore", "decisions"}
    assert all(set(row) == FIELDS for row in document["decisions"])
    return {row["id"]: row for row in document["decisions"]}


@pytest.mark.parametrize(
    ("version", "decision", "proven"),
    [
        ("0.15.3", "APPLY", True),
        ("0.16.1", "APPLY", True),
        ("0.17.0", "APPLY", True),
        ("0.17.1", "APPLY", True),
        ("0.18.0", "SKIP", True),
        ("0.19.2", "SKIP", True),
        ("0.16.2", "APPLY", False),
        ("0.16.0rc0+g1234abc", "APPLY", False),
        ("0.17.0rc0", "APPLY", False),
        ("0.20.0+1234abc", "SKIP", False),
    ],
)
def test_value_padding_by_version(version: str, decision: str, proven: bool):
    row = decisions(version, "--backend", "cuda")[VALUE_PADDING]
    assert (row["decision"], row["proven"]) == (decision, proven)
    assert ("number alone" in row["reason"]) == (not proven)


@pytest.mark.parametrize(
    ("version", "decision"),
    [("0.17.1", "SKIP"), ("0.18.0", "APPLY"), ("0.18.2", "APPLY"), ("0.19.2", "SKIP")],
)
def test_full_recompute_by_version(version: str, decision: str):
    assert decisions(version, "--backend", "cuda")["mtp-full-recompute"]["decision"] == decision


@pytest.mark.parametrize("version", ["0.16.2", "0.18.0"])
def test_a_tree_without_the_fix_is_patched_whatever_it_calls_itself(
    version: str, release: Release, tmp_path: Path
):
    tree = renumbered(release("0.16.1"), tmp_path, version)
    row = decisions(tree, "--backend", "cuda")[VALUE_PADDING]
    assert (row["decision"], row["proven"], row["evidence"]) == ("APPLY", True, "present")
    assert (version in row["reason"]) == (version == "0.18.0")
    assert len(row["fingerprint"]) == 16


def test_a_tree_with_the_fix_taken_out_is_patched(release: Release, tmp_path: Path):
    unfixed = {MLA: ("value = F.pad(value, [0, query.shape[-1] - orig_v_dim])", "pass")}
    row = decisions(copied(release("0.18.0"), tmp_path, unfixed))[VALUE_PADDING]
    assert (row["decision"], row["proven"]) == ("APPLY", True)


def test_a_tree_with_the_fix_is_not_patched_whatever_it_calls_itself(release: Release, tmp_path: Path):
    tree = renumbered(release("0.18.2"), tmp_path, "0.17.1")
    row = decisions(tree, "--backend", "cuda")[VALUE_PADDING]
    assert (row["decision"], row["proven"]) == ("SKIP", True)


def test_a_renamed_target_is_a_drift_that_stops_whoever_needs_it(release: Release, tmp_path: Path):
    tree = copied(release("0.16.1"), tmp_path, RENAMED)
    row = decisions(tree, "--backend", "cuda", code=4)[VALUE_PADDING]
    assert row["decision"] == "DRIFT"


def test_a_moved_method_is_named(release: Release, tmp_path: Path):
    method = "_roll_tensor_packed_seq"
    edits = {"transformer/multi_token_prediction.py": (f"def {method}(", f"def {method}uence(")}
    ran = run("plan", "--mcore", str(copied(release("0.16.1"), tmp_path, edits)), code=4)
    assert method in ran.stderr


def test_a_changed_seam_is_a_warning(release: Release, tmp_path: Path):
    edits = {"models/gpt/gpt_model.py": ("self.mtp_process =", "self.mtp_process = self.added =")}
    row = decisions(copied(release("0.16.1"), tmp_path, edits))["mtp-switch"]
    assert row["decision"] == "DRIFT" and "mtp_process" in row["reason"]


def test_an_allowed_drift_goes_on(release: Release, tmp_path: Path):
    edits = {MLA: ("cp_comm_type: Optional[str] = None,", "cp_comm_type: str = 0,")}
    tree = copied(release("0.16.1"), tmp_path, edits)
    drifted = [row["id"] for row in decisions(tree, code=4).values() if row["decision"] == "DRIFT"]
    assert VALUE_PADDING in drifted
    rows = decisions(tree, *(word for name in drifted for word in ("--allow-drift", name)))
    assert all(
        rows[name]["decision"] == "APPLY" and "--allow-drift" in rows[name]["reason"] for name in drifted
    )


def test_a_source_file_that_cannot_be_parsed_is_a_drift(release: Release, tmp_path: Path):
    tree = copied(release("0.16.1"), tmp_path, {MLA: ("def forward(", "def forward((")})
    row = decisions(tree, code=4)[VALUE_PADDING]
    assert row["decision"] == "DRIFT" and "cannot be parsed" in row["reason"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_backend_gets_its_own(backend: str):
    row = decisions("0.16.1", "--backend", backend)["cpu-moe-splits-on-host"]
    assert (row["decision"] == "APPLY") == (backend == "cpu")


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--mcore", "no-such-tree"), "--mcore no-such-tree: "),
        (("--mcore", "."), "--mcore .: "),
        (("--mcore", "x" * 5000), "--mcore xxx"),
        (("--mcore", "0.16.1", "--allow-drift", "mla-thd-value-pading"), VALUE_PADDING),
        (("--mcore", "0.16.1", "--request", "nothing-like-it"), "nothing-like-it"),
        (("--mcore", "0.16.1", "--backend", "tpu"), "'--backend'"),
    ],
    ids=["no-directory", "no-tree", "no-name", "allow-drift", "request", "backend"],
)
def test_a_wrong_call_is_a_usage_error_that_says_what_is_wrong(args: tuple[str, ...], named: str, messages):
    ran = run("plan", *args, code=2)
    assert named in ran.stderr
    messages(ran.stderr.rpartition("\nError: ")[2])


def test_an_opt_in_patch_that_cannot_apply_stops():
    ran = run("plan", "--mcore", "0.16.1", "--request", "mla-packed-qkv", code=4)
    assert "mla-packed-qkv" in ran.stderr


def test_without_any_megatron_the_default_release_is_decided(tmp_path: Path):
    find = "import importlib.util as u; raise SystemExit(bool(u.find_spec('megatron')))"
    environ = {**os.environ, "PYTHONPATH": ""}
    if subprocess.run([sys.executable, "-c", find], cwd=tmp_path, env=environ).returncode:
        pytest.skip("a megatron-core is installed in this environment")
    document = json.loads(run("plan", "--json", PYTHONPATH="").stdout)
    assert (document["mcore"]["version"], document["mcore"]["path"]) == ("0.16.1", None)


def test_the_installed_tree_is_the_one_on_the_path(release: Release):
    paths = [str(Path.cwd()), str(release("0.18.2"))]
    document = json.loads(run("plan", "--json", PYTHONPATH=os.pathsep.join(paths)).stdout)
    assert document["mcore"]["version"] == "0.18.2"
    assert document["mcore"]["path"] == str(release("0.18.2"))


def test_halves_from_two_trees_are_a_conflict(release: Release, tmp_path: Path):
    (tmp_path / "megatron/training").mkdir(parents=True)
    (tmp_path / "megatron/training/__init__.py").touch()
    paths = [str(Path.cwd()), str(release("0.16.1")), str(tmp_path)]
    ran = run("plan", "--backend", "cuda", code=4, PYTHONPATH=os.pathsep.join(paths))
    assert "CONFLICT" in ran.stdout and str(tmp_path) in ran.stderr


def test_list_names_patches_seams_traps_and_facades():
    entries = json.loads(run("list", "--json").stdout)["entries"]
    kinds = {entry["kind"] for entry in entries}
    assert kinds == {"patch", "seam", "trap", "facade"}
    assert "main-loss" in {entry["id"] for entry in entries if entry["kind"] == "seam"}


def test_what_a_patch_assumes_of_its_caller_is_said_where_it_is_applied_and_listed():
    """On 0.12 the tree's own training script returns tokens that are summed over cp already."""
    patch = "per-token-loss-context-parallel"
    assumption = decisions("0.12.3")[patch]["assumes"]
    assert "context-parallel" in assumption
    lines = run("plan", "--mcore", "0.12.3").stdout.splitlines()
    assert [assumption in line for line in lines if f" {patch} " in line] == [True]
    lines = run("plan", "--mcore", "0.13.1").stdout.splitlines()
    assert not any(assumption in line for line in lines if patch in line)
    (entry,) = [row for row in json.loads(run("list", "--json").stdout)["entries"] if row["id"] == patch]
    assert entry["assumes"] == assumption
    assert any(assumption in line for line in run("list").stdout.splitlines() if patch in line)
