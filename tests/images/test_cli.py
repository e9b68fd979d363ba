"""`mcore-bundle images` as a workflow, a Dockerfile and a maintainer call it."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.images.checkouts import ROOT, change, copied

PLAN = ROOT / "tests/images/bake.json"


def images(*words, root=ROOT, given=None):
    return subprocess.run(
        [sys.executable, "-m", "bundle", "images", *map(str, words), f"--root={root}"],
        cwd=ROOT,
        input=given,
        capture_output=True,
        timeout=300,
    )


def test_the_workflow_gets_the_jobs_of_what_changed(tmp_path):
    root = copied(tmp_path / "copy")
    before = tmp_path / "before.json"
    before.write_bytes(images("fingerprint", "--json", root=root).stdout)
    change(root, "STACKS", "cuda-mcore0.19", "pins", "sglang", "version", value="0.5.17")
    done = images("matrix", "-", f"--before={before}", "--json", root=root, given=PLAN.read_bytes())
    assert json.loads(done.stdout) == {
        "include": [{"target": "cuda-mcore0-19", "platform": "linux/amd64", "runner": "ubuntu-24.04"}]
    }


def test_a_check_that_fails_ends_with_2_and_names_everything(tmp_path):
    root = copied(tmp_path / "copy")
    assert images("check", f"--plan={PLAN}", root=root).returncode == 0
    change(root, "STACKS", "cpu", "pins", "torch", "version", value="2.12.1")
    done = images("check", f"--plan={PLAN}", root=root)
    assert done.returncode == 2
    for place in (b"cpu.in", b"cpu.txt", b"docs/images.md", b"cpu: the label", b"cpu: the tag"):
        assert place in done.stderr


def test_a_release_is_refused_while_a_digest_lacks():
    done = images("check", "--release")
    assert done.returncode == 2
    assert b"BASES.cpu.digest" in done.stderr


def test_what_is_no_text_is_a_usage_error():
    done = images("matrix", "-", given=b"\xff\xfe\x00")
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr


def test_stamping_something_else_fails_and_writes_nothing(tmp_path):
    done = images("stamp", "--stack=ascend-mcore0.12", f"--output={tmp_path / 'build-info.json'}")
    assert done.returncode == 3
    assert b"torch-npu: " in done.stderr
    assert not (tmp_path / "build-info.json").exists()


@pytest.mark.images
def test_one_command_locks_a_changed_version(tmp_path):
    if not shutil.which("uv"):
        pytest.skip("uv is not installed: make locks gets it")
    root = copied(tmp_path / "copy")
    change(root, "STACKS", "cpu", "pins", "megatron-core", "version", value="0.16.0")
    for command in (("lock", "cpu"), ("page",)):
        done = images(*command, root=root)
        assert done.returncode == 0, done.stderr.decode()
    assert images("check", root=root).returncode == 0
    locked = (root / "images/locks/cpu.txt").read_text()
    assert "megatron-core==0.16.0" in locked
    assert "://" not in locked
    assert (root / "images/locks/cpu.torch.txt").read_text() == (
        ROOT / "images/locks/cpu.torch.txt"
    ).read_text()
