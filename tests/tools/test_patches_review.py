"""`python -m tools.patches.review`, as whoever reads a new release calls it."""

import subprocess
import sys
from pathlib import Path

from tests.patches.trees import Release, copied

ROOT = Path(__file__).parents[2]
MLA = "transformer/multi_latent_attention.py"


def review(tree: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.patches.review", str(tree)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert ran.returncode == code, ran.stdout + ran.stderr
    return ran


def test_it_says_what_is_new(release: Release, tmp_path: Path, messages):
    root = release("0.16.1")
    nothing = review(root).stdout
    assert "new " not in nothing
    messages(nothing)
    edits = {MLA: ("cp_comm_type: Optional[str] = None,", "cp_comm_type: str = 0,")}
    tree = copied(root, tmp_path, edits)
    (tree / "megatron_core-0.16.1.dist-info").mkdir()
    (tree / "megatron_core-0.16.1.dist-info/METADATA").write_text("Name: megatron-core\nVersion: 0.16.1\n")
    says = review(tree).stdout
    assert "new signature" in says and ":MultiLatentAttention.__init__ in 0.16.1" in says
    assert "new code" in says and ":MLASelfAttention.__init__ in 0.16.1" in says
    messages(review(copied(root, tmp_path / "b", {}), code=2).stderr)
