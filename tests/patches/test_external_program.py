"""The patches in programs that are not ours, each in processes of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bundle.patches import external_program
from tests.patches.trees import Release, copied

pytestmark = pytest.mark.processes

COUNT = "mtp-loss-context-parallel-count"
NO_LAYERS, PER_TOKEN = "mtp-zero-layers", "mtp-per-token-weight"
ROLL = "megatron.core.transformer.multi_token_prediction:roll_tensor"
PREDICTING = Path(__file__).with_name("predicting.py")
SAYS_HOW_IT_RUNS = "import sys; print(sys.argv, sys.path[0], __name__, 'torch' in sys.modules)\n"


def python(*args: str | Path, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    """What a Python program printed, which must end with `code`."""
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**clean, **environ},
    )
    assert ran.returncode == code, ran.stdout + ran.stderr
    return ran


def patched(*args: str | Path, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "bundle.patched", *args, code=code, **environ)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "program.py"
    file.write_text(SAYS_HOW_IT_RUNS)
    return file


def norms(directory: Path, size: int, *before: str) -> tuple[list[float], list[str]]:
    """What each of so many ranks says of its gradients' norm, and all that it printed."""
    store = directory / f"store-{size}-{len(before)}"
    command = [sys.executable, "-W", "ignore", *before, str(PREDICTING), str(store)]
    ranks = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size)},
        )
        for rank in range(size)
    ]
    printed = [rank.communicate(timeout=600)[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), printed
    return [float(text.rpartition("norm ")[2]) for text in printed], printed


@pytest.mark.world
@pytest.mark.slow
def test_gradients_of_somebody_elses_program_are_those_of_one_rank(tmp_path: Path, release: Release):
    release("0.16.1")
    (alone,), _ = norms(tmp_path, 1)
    without, _ = norms(tmp_path, 2)
    enabled = ("-m", "bundle.patched", "--features", "mtp,cp", "--vouch", COUNT)
    together, printed = norms(tmp_path, 2, *enabled)
    assert without[0] == pytest.approx(alone, rel=0.05) and abs(without[0] / alone - 1) > 0.01
    assert together == pytest.approx([alone, alone], rel=1e-6)
    assert printed[0].count(f"APPLY {COUNT}") == 1 and "rank 0: " in printed[0]
    assert "APPLY" not in printed[1]


def test_a_script_runs_as_python_runs_it(script: Path):
    said = patched("--features", "cp", script, "--features", "-m", "x").stdout
    assert said.startswith(f"{[str(script), '--features', '-m', 'x']} {script.parent} __main__ False\n")
    module = patched("-m", "program", "x", PYTHONPATH=str(script.parent)).stdout
    assert module.startswith(f"['{script}', 'x']") and " __main__ False" in module


def test_a_program_ends_as_it_would_alone(script: Path):
    script.write_text("raise SystemExit(7)")
    patched(script, code=7)
    script.write_text("def fails(): raise KeyError('its own')\nfails()")
    failure = patched(script, code=1).stderr
    assert f'"{script}", line 1' in failure and "KeyError" in failure


def test_the_tree_beside_the_script_is_decided_about(script: Path, release: Release):
    (script.parent / "megatron").symlink_to(release("0.15.3") / "megatron")
    said = patched("--features", "mtp,packed", script).stderr
    assert f"megatron-core 0.15.3 in {script.parent}" in said
    assert any("WARNING" in line and "mtp-packed: " in line for line in said.splitlines())


def test_what_is_assumed_of_a_caller_must_be_vouched_for(script: Path, release: Release):
    (script.parent / "megatron").symlink_to(release("0.16.1") / "megatron")
    said = patched("--features", "mtp,cp", script).stderr
    assert f"UNVOUCHED {COUNT}: " in said and f"APPLY {NO_LAYERS}" in said
    said = patched("--features", "mtp,cp", "--vouch", COUNT, script).stderr
    assert f"APPLY {COUNT}" in said and f"UNVOUCHED {PER_TOKEN}" in said


def test_a_changed_tree_is_refused_by_name_where_it_is_met(script: Path, release: Release):
    edit = ("rolled_tensor = torch.roll(tensor", "rolled_tensor = 1 * torch.roll(tensor")
    copied(release("0.16.1"), script.parent, {"transformer/multi_token_prediction.py": edit})
    said = ("--features", "mtp,cp", "--vouch", COUNT)
    ran = patched(*said, script, code=4)
    assert f"{COUNT}: DRIFT: " in ran.stderr and not ran.stdout
    ran = patched(*said, "--allow-drift", COUNT, script)
    assert ran.stdout and f"APPLY {COUNT}: " in ran.stderr and "--allow-drift" in ran.stderr
    ran = patched("--vouch", COUNT, script)  # nobody says what it uses: the others land
    assert ran.stdout and f"APPLY {NO_LAYERS}" in ran.stderr
    assert any("WARNING" in line and f"{COUNT}: DRIFT" in line for line in ran.stderr.splitlines())
    ran = patched("--vouch", COUNT, "--strict", script, code=4)
    assert f"{COUNT}: DRIFT: " in ran.stderr and not ran.stdout


SMOOTHING = "label-smoothing-over-ranks"
THEIRS = """
from megatron.core.tensor_parallel import cross_entropy
def forward(ctx, logits, target, label_smoothing=0.0):
    vocab_size = exp_logits.size(-1) * get_tensor_model_parallel_world_size()
def put():
    cross_entropy._VocabParallelCrossEntropy.forward = forward
"""
COPIED = THEIRS.replace(" * get_tensor_model_parallel_world_size()", "")
UNFAMILIAR = THEIRS.replace("exp_logits.size(-1) * get_tensor_model_parallel_world_size()", "theirs()")
OTHERS = """
from megatron.core.transformer.transformer_config import TransformerConfig
def ours(self):
    self.checked = True
TransformerConfig.__post_init__ = ours
"""
FRAMEWORKS = {  # its file, what is said of the patch, and what becomes of it
    "it mends the defect": (f"{THEIRS}put()\n", "", "OWNED"),
    "whoever vouches": (f"{THEIRS}put()\n", "--vouch", "OWNED"),
    "in some of its jobs": (f"{THEIRS}if A:\n    put()\n", "", "OWNED"),
    "which are not these": (f"{THEIRS}if A:\n    put()\n", "--vouch", "APPLY"),
    "its copy has it as well": (f"{COPIED}put()\n", "", "APPLY"),
    "nobody has read its copy": (f"{UNFAMILIAR}put()\n", "--vouch", "OWNED"),
    "and it is allowed": (f"{UNFAMILIAR}put()\n", "--allow-drift", "APPLY"),
}


def test_where_a_framework_puts_its_own_code_no_patch_for_anothers_is(script: Path, release: Release):
    (script.parent / "verl").mkdir()
    (script.parent / "verl/__init__.py").write_text(OTHERS)
    (script.parent / "megatron").symlink_to(release("0.16.1") / "megatron")
    said = patched("--features", "cp", script).stderr
    (line,) = [line for line in said.splitlines() if f"OWNED {NO_LAYERS}: " in line]
    assert "TransformerConfig.__post_init__" in line and "verl/__init__.py:5" in line


@pytest.mark.parametrize("how", FRAMEWORKS)
def test_what_a_framework_mends_is_left_to_it(how: str, script: Path, release: Release, messages):
    text, said_of_it, action = FRAMEWORKS[how]
    (script.parent / "verl").mkdir()
    (script.parent / "verl/__init__.py").write_text(text)
    (script.parent / "megatron").symlink_to(release("0.16.1") / "megatron")
    words = (said_of_it, SMOOTHING) if said_of_it else ()
    said = patched("--features", "tp,label-smoothing", *words, script).stderr
    (line,) = [line for line in said.splitlines() if f" {SMOOTHING}: " in line]
    assert line.strip().startswith(f"{action} {SMOOTHING}: ")
    messages(line.strip())


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("--features", "mtp,paked"), "paked"),
        (("--vouch", "mtp-zero-layer"), "mtp-zero-layer"),
        ((), "nowhere.py"),
    ],
)
def test_a_wrong_word_is_named(args: tuple[str, ...], word: str, script: Path, messages):
    ran = patched(*args, script if args else "nowhere.py", code=2)
    assert word in ran.stderr and not ran.stdout
    messages(ran.stderr)


def test_a_choice_that_is_none_is_named(script: Path):
    ran = patched("--backend", "gpu", script, code=2)
    assert "'gpu'" in ran.stderr and not ran.stdout


def test_without_megatron_nothing_runs(script: Path):
    alone = "import sys; from bundle import patched; sys.path[:] = ['']; patched.main()"
    ran = python("-c", alone, script, code=3)
    assert "megatron-core" in ran.stderr and not ran.stdout


def test_a_program_that_has_set_up_logging_hears_it_there_once(release: Release):
    program = """
import logging, sys
logging.basicConfig(format="theirs %(name)s %(message)s", level=logging.INFO)
from bundle import patches
patches.enable(("cp",))
patches.enable(["cp"])
assert not {"torch", "megatron"} & set(sys.modules)
try: patches.enable(["mtp"])
except Exception as error: print(type(error).__name__, error)
"""
    ran = python("-c", program, PYTHONPATH=str(release("0.16.1")))
    heard = [line for line in ran.stderr.splitlines() if line.startswith("theirs ")]
    assert [line.split()[1] for line in heard] == [external_program.__name__]
    assert ran.stdout.startswith("PatchError ")


@pytest.mark.slow
def test_what_is_imported_already_is_patched_at_once_or_refused(release: Release, messages):
    program = f"""
import megatron.core.transformer.multi_token_prediction as at
from megatron.core.transformer.multi_token_prediction import roll_tensor
from bundle import patches
from bundle.patches import patcher
enable = lambda: patches.enable(("mtp", "cp"), vouched=({COUNT!r},))
try: enable()
except Exception as error: print(type(error).__name__, error)
assert at.roll_tensor is roll_tensor
assert not patcher.list_applied_targets() and not patcher.list_pending_modules()
before, roll_tensor = [roll_tensor], None
enable()
assert {ROLL!r} in patcher.list_applied_targets()
assert "megatron.core.models.gpt.gpt_model" in patcher.list_pending_modules()
assert at.roll_tensor is not before[0] and at.roll_tensor.__wrapped__ is before[0]
"""
    ran = python("-c", program, PYTHONPATH=str(release("0.16.1")))
    refusal, *violations = ran.stdout.splitlines()
    assert refusal.startswith("PatchError ") and len(violations) == 1
    assert COUNT in violations[0] and "__main__" in violations[0] and violations[0].endswith(ROLL)
    messages(ran.stdout)
