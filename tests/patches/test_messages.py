"""What is said about trees: names escaped, missing files called missing, tags understood, zips seen."""

import zipfile
from pathlib import Path

import pytest

from bundle import files
from bundle.environment.packages import InstalledPackages, detect
from bundle.environment.search import build_search_path
from bundle.patches import PatchAction
from bundle.patches.megatron_core import (
    find_installed_or_default_core,
    load_review_table,
    resolve_core_path_or_version,
)
from bundle.patches.mindspeed import explain_possible_replacement
from bundle.patches.plan import survey_patches
from tests.command import run_bundle
from tests.patches.trees import Release, copied

LIES = "\x1b[2J\nAPPLY    everything"


def test_names_from_a_tree_reach_no_terminal(release: Release, tmp_path: Path):
    root = tmp_path / f"tree{LIES.replace('/', '')}"
    copied(release("0.16.1"), root, {})
    info = root / "megatron/core/package_info.py"
    info.write_text(
        "MAJOR, MINOR, PATCH = 0, 16, 1\nMAJOR = 0\nMINOR = 16\nPATCH = 1\nPRE_RELEASE = " + repr(LIES)
    )
    ran = run_bundle("patches", "plan", "--mcore", root)
    printed = ran.stdout + ran.stderr
    assert "\x1b" not in printed and "\nAPPLY    everything" not in printed
    assert "\\x1b[2J\\nAPPLY    everything" in ran.stdout


@pytest.mark.parametrize(
    ("name", "printed"), [("a\tb", "a\\tb"), ("\udc80", "\\udc80"), ("Grüße 1", "Grüße 1")]
)
def test_what_may_be_printed_is_left_alone(name: str, printed: str):
    assert files.to_printable(name) == printed


def test_a_file_that_is_not_there_is_called_so(release: Release, tmp_path: Path, messages):
    tree = copied(release("0.16.1"), tmp_path, {})
    (tree / "megatron/core/transformer/moe/moe_utils.py").unlink()
    rows = {
        d.id: d
        for d in survey_patches(
            resolve_core_path_or_version(str(tree), load_review_table()), load_review_table(), detect()
        ).decisions
    }
    row = rows["router-without-te-gemm"]
    assert row.action is PatchAction.DRIFT
    assert "moe_utils.py" in row.reason and "unfamiliar" not in row.reason
    messages(row.reason)


@pytest.mark.parametrize("name", ["core_v0.16.1", "v0.16.1", "0.16.1"])
def test_a_tag_is_a_version(name: str):
    subject = resolve_core_path_or_version(name, load_review_table())
    assert subject.reference == "0.16.1"


def test_a_zip_on_the_path_is_said(tmp_path: Path, messages):
    archive, other = tmp_path / "megatron.zip", tmp_path / "other.zip"
    for file, member in ((archive, "megatron/core/__init__.py"), (other, "x.py")):
        with zipfile.ZipFile(file, "w") as opened:
            if "/" in member:
                opened.mkdir("megatron")
            opened.writestr(member, "")
    (tmp_path / "no.zip").write_text("no zip")
    paths = [str(tmp_path / name) for name in ("other.zip", "no.zip", "megatron.zip")]
    subject = find_installed_or_default_core(
        InstalledPackages(build_search_path(paths, "", tmp_path)), load_review_table()
    )
    assert subject.root is None and str(archive) in subject.origin
    nothing = find_installed_or_default_core(
        InstalledPackages(build_search_path([], "", tmp_path)), load_review_table()
    )
    assert nothing.root is None and ".zip" not in nothing.origin
    messages(subject.origin)
    messages(nothing.origin)


READ = "d0d5809d4323eb908f89e87958de254465eb57b4"


@pytest.mark.parametrize(
    ("commit", "value"), [(None, "core_r0.15.3"), ("0" * 40, "000000"), (READ, "core_r0.15.3")]
)
def test_mindspeed_is_named_whole_and_not_vouched_for(commit: str | None, value: str, messages):
    target = "megatron.core.transformer.moe.router:TopKRouter.routing"
    reason = str(explain_possible_replacement(target, commit))
    assert target in reason and value in reason
    messages(reason)
