"""`mcore-bundle patches audit`, as its users and their CI call it."""

import json
import os
import resource
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from bundle.patches import hook
from bundle.patches.hook import HookArguments
from tests.command import run_bundle
from tests.environment.trees import install
from tests.patches.trees import Release, copied

ROOT = Path(__file__).parents[2]
FIELDS = {
    "id", "standing", "kind", "proven", "reason", "features", "unless", "why", "replaced_by", "mended_in",
    "instead", "patch", "assumes",
}  # fmt: skip
ROLL = "mtp-context-parallel-roll"
TRAP = "moe-tensor-without-expert-parallel"


def run(*args: str, code: int, **environ: str) -> subprocess.CompletedProcess[str]:
    return run_bundle("patches", "audit", *args, code=code, environment=environ)


def document(*args: str, code: int = 4, **environ: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*args, "--json", code=code, **environ).stdout)
    assert set(found) == {
        "schema", "environment", "mcore", "frameworks", "features", "reaching", "defects", "upgrades",
        "hooks",
    }  # fmt: skip
    assert found["schema"] == 2 and all(set(row) == FIELDS for row in found["defects"])
    assert bool(found["reaching"]) == (code == 4)
    return found


def standings(found: dict[str, Any]) -> dict[str, str]:
    return {row["id"]: row["standing"] for row in found["defects"]}


def blocks(*args: str, code: int) -> dict[str, str]:
    """Defect -> what is printed of it."""
    printed = run(*args, code=code).stdout.split("\n\n")
    return {block.split()[1]: block for block in printed if block.startswith(("PRESENT ", "UNKNOWN "))}


def test_a_release_by_its_number_has_what_was_read_in_it():
    found = document("--mcore", "0.17.1")
    silent, loud = "mtp-packed-roll-boundaries", "mtp-packed-full-recompute"
    mended_before = {"mtp-zero-layers", ROLL}
    assert {silent, loud} <= standings(found).keys()
    assert silent in found["reaching"] and loud not in found["reaching"]
    assert not mended_before & standings(found).keys()
    assert not {name for name in standings(found) if name.startswith("cpu-")}
    assert found["features"] is None and found["frameworks"] == []


@pytest.mark.parametrize(
    ("version", "features", "defect", "is_listed"),
    [
        ("0.17.1", "mla, tp,SP", "mla-rotary-key-gradient", True),
        ("0.17.1", "mla, tp,SP", "mla-query-norm-gradient", True),
        ("0.12.3", "mla,tp,sp", "mla-tensor-without-sequence-parallel", False),
        ("0.12.3", "mla,tp", "mla-tensor-without-sequence-parallel", True),
    ],
)
def test_only_what_reaches_the_features_is_named(version: str, features: str, defect: str, is_listed: bool):
    found = document("--mcore", version, "--features", features)
    assert (defect in standings(found)) == is_listed
    assert found["reaching"] == [row["id"] for row in found["defects"] if row["kind"] == "silent"]
    assert not {name for name in standings(found) if name.startswith(("mtp", "balancing"))}


def test_what_avoids_a_trap_is_said(messages):
    (row,) = [row for row in document("--mcore", "0.16.1")["defects"] if row["id"] == TRAP]
    assert row["unless"] == ["ep"]
    block = blocks("--mcore", "0.16.1", code=4)[TRAP]
    assert block.startswith("PRESENT ") and block.partition("\n")[0].endswith(" ep")
    messages(block)


def test_nothing_silent_that_reaches_ends_well():
    found = document("--mcore", "0.19.2", "--features", "pp,packed", code=0)
    assert {row["kind"] for row in found["defects"]} == {"slow"} and found["upgrades"] == []
    assert "0 present" in run("--mcore", "0.19.2", "--features", "pp,packed", code=0).stdout


def test_a_slow_defect_is_named_with_its_patch_and_is_no_reason_to_fail(messages):
    options = ("--mcore", "0.16.1", "--features", "lora")
    slow = {row["id"]: row for row in document(*options, code=0)["defects"] if row["kind"] == "slow"}
    assert slow.keys() == {"frozen-weight-product", "optimizer-gather-memory"}
    row = slow["frozen-weight-product"]
    assert (row["standing"], row["patch"]) == ("present", True)
    assert row["mended_in"] == "0.19"
    block = blocks(*options, code=0)[row["id"]]
    assert block.startswith("PRESENT ") and block.partition("\n")[0].endswith(" lora")
    messages(block)
    assert "frozen-weight-product" not in standings(document("--mcore", "0.19.2", code=4))


def test_a_version_that_nobody_reviewed_is_unknown_and_no_reason_to_fail():
    options = ("--mcore", "0.16.2", "--features", "mtp,packed")
    found = document(*options, code=0)
    assert set(standings(found).values()) == {"unknown"}
    assert not any(row["proven"] or row["patch"] for row in found["defects"])
    printed = blocks(*options, code=0)
    assert printed.keys() == {row["id"] for row in found["defects"] if row["kind"] != "error"}
    assert all(block.startswith("UNKNOWN ") for block in printed.values())


def test_a_trap_by_its_number_alone_is_unknown_and_says_so_once(messages):
    block = blocks("--mcore", "0.16.2", "--features", "moe,etp-unlike-tp", code=0)[TRAP]
    assert block.startswith("UNKNOWN ") and block.count("0.16.2") == 1
    messages(block)


@pytest.mark.parametrize(
    ("defect", "remedies"),
    [
        (TRAP, {"parallel.etp", "parallel.tp"}),
        ("cuda-norm-of-expert-weights", {"0.19", "patch"}),
        ("mtp-loss-context-parallel-count", {"0.17", "patch", "assumes"}),
    ],
)
def test_what_to_do_is_said(defect: str, remedies: set[str], messages):
    block = blocks("--mcore", "0.16.1", "--features", "moe,tp,etp-unlike-tp,mtp,cp", code=4)[defect]
    assert all(remedy in block for remedy in remedies)
    messages(block)


def test_an_upgrade_is_named_with_what_it_brings(messages):
    """The same defect in other code."""
    out = run("--mcore", "0.16.1", "--features", "mtp,cp", code=4).stdout
    (upgrade,) = [line for line in out.splitlines() if line.startswith("megatron-core 0.17")]
    assert upgrade.endswith("-normalisation")
    messages(upgrade)


def test_a_defect_that_comes_back_is_not_mended_by_the_release_before():
    (row,) = [r for r in document("--mcore", "0.13.1")["defects"] if r["id"] == "restricted-unpickle"]
    assert row["mended_in"] == "0.17"  # 0.14 to 0.16 do not have it, and 0.17.0 does


def test_the_tree_decides_and_not_its_number(release: Release, tmp_path: Path):
    edits = {"package_info.py": ("MINOR = 12", "MINOR = 19")}
    found = document("--mcore", str(copied(release("0.12.3"), tmp_path, edits)))
    assert found["mcore"]["version"] == "0.19.3" and ROLL in found["reaching"]


def test_code_that_is_unfamiliar_is_unknown(release: Release, tmp_path: Path):
    edits = {
        "tensor_parallel/cross_entropy.py": (
            "vocab_size = exp_logits.size(-1)",
            "vocab_size = columns(exp_logits)",
        )
    }
    found = document("--mcore", str(copied(release("0.19.2"), tmp_path, edits)))
    (row,) = [r for r in found["defects"] if r["id"] == "label-smoothing-over-ranks"]
    assert row["standing"] == "unknown" and "allow-drift" not in row["reason"]


def environment(root: Path, megatron: Path) -> Path:
    """An environment that has a checkout of megatron on its path."""
    venv.create(root)
    (packages,) = root.glob("lib/python3.*/site-packages")
    (packages / "checkout.pth").write_text(f"{megatron}\n")
    install(packages, "verl", "0.7.0")
    return packages


def test_another_environment_is_read_and_not_started(release: Release, tmp_path: Path):
    packages = environment(tmp_path / "env", release("0.12.3"))
    (packages / "sitecustomize.py").write_text(f"open({str(tmp_path / 'started')!r}, 'w')")
    for named in (tmp_path / "env", tmp_path / "env/bin/python"):
        found = document("--env", str(named))
        assert found["mcore"]["version"] == "0.12.3" and found["mcore"]["origin"] == "checkout.pth"
        assert [(f["name"], f["version"]) for f in found["frameworks"]] == [("verl", "0.7.0")]
    assert not (tmp_path / "started").exists()


def test_the_active_environment_is_taken_where_our_own_has_no_megatron(release: Release, tmp_path: Path):
    """As `pipx run` and `uvx` call it: from an environment that has nothing but this package."""
    environment(tmp_path / "env", release("0.12.3"))
    venv.create(tmp_path / "own")
    theirs = os.pathsep.join([str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))])
    command = [str(tmp_path / "own/bin/python"), "-c", _WITHOUT_MEGATRON, "patches", "audit", "--json"]
    environ = {**os.environ, "VIRTUAL_ENV": str(tmp_path / "env"), "NEEDS": theirs, "PYTHONPATH": ""}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ)
    assert ran.returncode == 4, ran.stderr
    found = json.loads(ran.stdout)
    assert found["environment"] == str(tmp_path / "env") and found["mcore"]["version"] == "0.12.3"


_WITHOUT_MEGATRON = """
import os, sys
own = list(sys.path)
sys.path += os.environ["NEEDS"].split(os.pathsep)
from bundle.environment import search
current = search.build_worker_path
def without(paths=own):
    return search.build_search_path(paths, "", search.Path.cwd())
search.build_worker_path = without
from bundle.cli import main
main()
"""


def test_an_environment_without_megatron_is_said(tmp_path: Path, messages):
    venv.create(tmp_path / "env")
    ran = run("--env", str(tmp_path / "env"), code=3, PYTHONPATH="")
    assert "megatron-core" in ran.stderr and "--mcore PATH" in ran.stderr
    messages(ran.stderr)


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--features", "mtp,packing,nonsense", "- packing; "),
        ("--env", "nowhere", "--env nowhere: "),
        ("--mcore", "nowhere", "--mcore nowhere: "),
    ],
    ids=["features", "env", "mcore"],
)
def test_a_wrong_call_is_a_usage_error(option: str, value: str, named: str, messages):
    ran = run(option, value, code=2)
    assert named in ran.stderr
    messages(ran.stderr)


def test_a_hook_that_patches_every_program_of_the_environment_is_named(release: Release, tmp_path: Path):
    packages = environment(tmp_path / "env", release("0.12.3"))
    assert document("--env", str(tmp_path / "env"))["hooks"] == []
    file = packages / hook.FILE_NAME
    file.write_text(HookArguments(("mtp", "cp"), vouched=("mtp-packed",)).render_file())
    said = {"features": ["mtp", "cp"], "vouched": ["mtp-packed"], "allowed": [], "backend": "auto"}
    found = document("--env", str(tmp_path / "env/bin/python"))
    assert found["hooks"] == [{"file": str(file), **said, "fault": None}]
    text = run("--env", str(tmp_path / "env"), code=4).stdout
    (line,) = [line for line in text.splitlines() if str(file) in line]
    assert "mtp, cp;" in line and "mtp-packed;" in line
    file.write_text("import os\n")
    (broken,) = document("--env", str(tmp_path / "env"))["hooks"]
    assert broken["features"] is None and broken["fault"]


def test_a_released_megatron_in_a_plain_environment_takes_less_than_a_second_of_cpu(
    release: Release, tmp_path: Path
):
    venv.create(tmp_path / "env")
    (packages,) = (tmp_path / "env").glob("lib/python3.*/site-packages")
    shutil.copytree(release("0.19.2"), packages, dirs_exist_ok=True, copy_function=os.link)
    took = []
    for _ in range(2):  # of others on this machine the smaller has less
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        said = run("--env", str(tmp_path / "env/bin/python"), code=4).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert said.startswith("megatron-core 0.19.2 in ") and min(took) < 1.0  # 0.5 on a quiet machine
