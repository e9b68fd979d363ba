"""`python -m tools.images` as a workflow, a Dockerfile and a maintainer call it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.images.checkouts import ROOT, change, copied

PLAN = ROOT / "tests/tools/images/bake.json"


def images(*words, root=ROOT, given=None):
    return subprocess.run(
        [sys.executable, "-m", "tools.images", *map(str, words), f"--root={root}"],
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


@pytest.mark.slow
def test_stamping_something_else_fails_and_writes_nothing(tmp_path):
    done = images("stamp", "--stack=ascend", f"--output={tmp_path / 'build-info.json'}")
    assert done.returncode == 3
    assert b"torch-npu: " in done.stderr
    assert not (tmp_path / "build-info.json").exists()


@pytest.mark.slow
def test_a_build_can_stamp_with_what_its_context_lets_in(tmp_path):
    context, output = tmp_path / "context", tmp_path / "build-info.json"
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line.startswith(("!tools", "!docker-bake.json")):
            name = line.removeprefix("!")
            (context / name).parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, context / name)
    command = [sys.executable, "-P", "-m", "tools.images", "stamp", "--stack=cpu", f"--output={output}"]
    environment = os.environ | {"PYTHONPATH": str(context)}
    done = subprocess.run(
        [*command, f"--root={context}"], cwd=tmp_path, env=environment, capture_output=True, timeout=300
    )
    # 3: what is installed here is not the stack; either way all of the command was there.
    assert (done.returncode, output.exists()) in ((0, True), (3, False)), done.stderr.decode()


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
    part = Path("images/locks/cpu.torch.txt")
    assert (root / part).read_text() == (ROOT / part).read_text()
