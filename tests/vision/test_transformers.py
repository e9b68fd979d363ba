"""Towers compute the same with every transformers that an image has, and with the oldest that has them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKED = re.compile(r"^transformers==(\S+)", re.MULTILINE)
OLDEST = "4.57.0"  # the first with Qwen3-VL

pytestmark = pytest.mark.releases  # each is installed from the index


def versions():
    """Those of the images, and the oldest."""
    texts = (path.read_text() for path in (ROOT / "images" / "locks").glob("*.txt"))
    return sorted({found for text in texts for found in LOCKED.findall(text)} | {OLDEST})


@pytest.mark.parametrize("version", versions())
def test_towers_by_packed_attention_and_image_by_image(version, tmp_path):
    pytest.importorskip("megatron.core")
    place = ["--quiet", "--disable-pip-version-check", "--target", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", "install", *place, f"transformers=={version}"], check=True)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.vision.packed"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.split() == [version, "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"]
