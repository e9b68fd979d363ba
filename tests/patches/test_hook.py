"""The hook in environments of their own: real ones, by Python's own venv, with a real megatron-core."""

import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.command import run_bundle
from tests.patches.test_external_program import COUNT, PREDICTING, norms
from tests.patches.trees import Release, copied

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
NAME = "mcore-bundle-patches.pth"
SITE = Path("lib", f"python{sysconfig.get_python_version()}", "site-packages")
PACKAGES = Path(sysconfig.get_path("purelib"))
# The plan of this process, and what of it is applied.
APPLIED = (
    "from bundle.patches import patcher; print(patcher.get_active_plan().digest,"
    " sorted(patcher.list_applied_targets()))\n"
)
MEGATRON = "import megatron.core.transformer.multi_token_prediction\n"


class Environment:
    """One environment of Python, and what runs in it."""

    def __init__(self, root: Path, base: "Environment | None" = None) -> None:
        self.root, self.site, self.python = root, root / SITE, str(root / "bin/python")
        python = base.python if base else sys.executable
        flags = ["--system-site-packages"] if base else []
        subprocess.run([python, "-m", "venv", "--without-pip", *flags, root], check=True, timeout=300)

    def ran(self, *args: str | Path, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
        """What a program in it printed, which must end with `code`."""
        clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "PYTHONPATH")}
        ran = subprocess.run(
            [self.python, "-W", "ignore", *map(str, args)],
            capture_output=True,
            text=True,
            timeout=600,
            env={**clean, **environ},
            cwd=self.root.parent,
        )
        assert ran.returncode == code, ran.stdout + ran.stderr
        return ran

    def paths(self, *paths: Path) -> None:
        """Has it import from these too."""
        (self.site / "paths.pth").write_text("".join(f"{path}\n" for path in paths))

    def state(self) -> dict[str, str]:
        """Every name in it, with its kind, permissions and bytes; bytecode apart."""
        return {
            str(path.relative_to(self.root)): f"{path.lstat().st_mode:o} {_digest(path)}"
            for path in sorted(self.root.rglob("*"))
            if "__pycache__" not in path.parts
        }


def _digest(path: Path) -> str:
    if path.is_symlink():
        return str(path.readlink())
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "directory"


def hook(*args: str | Path, code: int = 0) -> str:
    """What `mcore-bundle patches ARGS` says."""
    ran = run_bundle("patches", *args, code=code)
    return ran.stdout + ran.stderr


@pytest.fixture
def environment(tmp_path: Path, release: Release) -> Environment:
    """One with megatron-core 0.16.1, torch, and mcore-bundle as an editable install has it."""
    made = Environment(tmp_path / "environment")
    made.paths(ROOT, release("0.16.1"), PACKAGES)
    return made


@pytest.fixture
def light(tmp_path: Path, release: Release) -> Environment:
    """One whose megatron-core has the code of 0.16.1, and imports none of it by itself."""
    made = Environment(tmp_path / "light")
    made.paths(ROOT, made.root / "megatrons", PACKAGES)
    tree = copied(release("0.16.1"), made.root / "megatrons", {})
    (tree / "megatron/core/__init__.py").write_text("print('megatron.core')\n")
    return made


@pytest.mark.world
@pytest.mark.slow
def test_a_program_that_knows_nothing_of_it_trains_as_patched_and_nothing_is_left(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    before = environment.state()
    hook("enable", "--env", environment.root, "--features", "mtp,cp", "--vouch", COUNT)
    assert environment.state().keys() - before.keys() == {str(SITE / NAME)}
    monkeypatch.setattr(sys, "executable", environment.python)
    (alone,), _ = norms(tmp_path, 1)
    together, printed = norms(tmp_path, 2)
    assert together == pytest.approx([alone, alone], rel=1e-6)
    assert printed[0].count(f"APPLY {COUNT}") == 1 and "APPLY" not in printed[1]
    monkeypatch.undo()
    hook("disable", "--env", environment.root)
    assert environment.state() == before
    assert not re.search(r"^\s*(import|from) bundle", PREDICTING.read_text(), re.MULTILINE)


@pytest.mark.slow
def test_what_is_applied_is_what_enable_applies(environment: Environment):
    by_hand = f"from bundle import patches; patches.enable(('mtp', 'cp'), vouched=({COUNT!r},))\n"
    wanted = environment.ran("-c", by_hand + MEGATRON + APPLIED).stdout.splitlines()[-1]
    hook("enable", "--env", environment.root, "--features", "mtp,cp", "--vouch", COUNT)
    assert environment.ran("-c", MEGATRON + APPLIED).stdout.splitlines()[-1] == wanted
    assert environment.ran("-c", by_hand + MEGATRON + APPLIED).stdout.splitlines()[-1] == wanted


def test_a_program_that_enables_other_patches_itself_keeps_those(light: Environment):
    by_hand = "from bundle import patches; patches.enable(('packed', 'mla'))\nimport megatron.core\n"
    wanted = light.ran("-c", by_hand + APPLIED).stdout
    hook("enable", "--env", light.root, "--features", "mtp")
    assert light.ran("-c", by_hand + APPLIED).stdout == wanted
    assert light.ran("-c", "import megatron.core\n" + APPLIED).stdout != wanted


def test_an_interpreter_starts_as_before(light: Environment):
    says = "import sys; print(sorted(sys.modules), sys.path, dir(), sorted(vars(__builtins__)))"
    before = light.ran("-c", says)
    hook("enable", "--env", light.root)
    after = light.ran("-c", says)
    assert (after.stdout, after.stderr) == (before.stdout, "")


def test_a_program_with_a_package_of_its_own_named_bundle_has_that(light: Environment, tmp_path: Path):
    hook("enable", "--env", light.root)
    (tmp_path / "own/bundle").mkdir(parents=True)
    (tmp_path / "own/bundle/__init__.py").write_text("whose = 'mine'\n")
    script = tmp_path / "own/program.py"
    script.write_text("import bundle; print(bundle.whose)\n")
    assert light.ran(script).stdout == "mine\n"
    script.write_text("import megatron.core\n")
    said = light.ran(script, code=1).stderr
    assert "'bundle.patches'" in said.splitlines()[-1]


def test_who_only_looks_sets_off_nothing_and_who_imports_it_under_S_is_alone(light: Environment):
    looks = "import importlib.util as u, sys; print(u.find_spec('megatron.core').origin, len(sys.modules))"
    before = light.ran("-c", looks).stdout
    hook("enable", "--env", light.root)
    assert light.ran("-c", looks).stdout == before
    imports = f"import sys; sys.path.append({str(light.root / 'megatrons')!r}); import megatron.core as m\n"
    says = "print(type(m.__loader__).__name__, type(m.__spec__.loader).__name__, 'bundle' in sys.modules)"
    plain = "megatron.core\nSourceFileLoader SourceFileLoader "
    assert light.ran("-S", "-c", imports + says).stdout == f"{plain}False\n"
    assert light.ran("-I", "-c", imports + says).stdout == f"{plain}True\n"


@pytest.mark.parametrize(
    ("guard", "code"), [("ImportError", 1), ("Exception", 0)], ids=["optional", "swallowed"]
)
def test_where_it_cannot_patch_megatron_is_not_imported_and_nothing_else_is_touched(
    guard: str, code: int, environment: Environment, release: Release, tmp_path: Path
):
    hook("enable", "--env", environment.root, "--features", "mtp,cp", "--vouch", COUNT)
    edit = ("rolled_tensor = torch.roll(tensor", "rolled_tensor = 1 * torch.roll(tensor")
    changed = copied(release("0.16.1"), tmp_path / "changed", {"transformer/multi_token_prediction.py": edit})
    environment.paths(ROOT, changed, PACKAGES)
    program = f"try: import megatron.core\nexcept {guard}: print('without')\nimport sys\n"
    said = environment.ran("-c", program + "assert 'megatron.core' not in sys.modules", code=code)
    assert "megatron.core" in said.stderr and f"{COUNT}: DRIFT: " in said.stderr
    assert said.stdout == ("" if code else "without\n")
    unrelated = environment.ran("-c", "import json, email; print('fine')")
    assert (unrelated.stdout, unrelated.stderr) == ("fine\n", "")


def test_it_outlives_mcore_bundle_and_can_still_be_taken_away(light: Environment):
    before = light.state()
    hook("enable", "--env", light.root)
    (light.site / "paths.pth").unlink()
    assert light.ran("-c", "print('fine')").stderr == ""
    said = light.ran("-c", "import megatron.core", code=1, PYTHONPATH=str(light.root / "megatrons"))
    assert "mcore-bundle" in said.stderr.splitlines()[-1] and "megatron.core\n" not in said.stdout
    hook("disable", "--env", light.python)
    assert before.keys() - light.state().keys() == {str(SITE / "paths.pth")}
    assert not light.state().keys() - before.keys()


def test_again_is_no_change_and_other_words_are_refused(light: Environment, messages):
    assert hook("enable", "--env", light.root, "--features", "cp").startswith("written: ")
    state = light.state()
    assert hook("enable", "--env", light.python, "--features", " CP,").startswith("there already: ")
    refusal = hook("enable", "--env", light.root, code=3)
    assert NAME in refusal and "features cp" in refusal and light.state() == state
    messages(refusal)
    assert hook("disable", "--env", light.root).startswith("removed: ")
    assert hook("disable", "--env", light.root).startswith("not there: ")


@pytest.mark.parametrize("damage", ["torn", "foreign", "changed", "said", "link", "directory"])
def test_a_file_that_is_not_ours_or_not_whole_is_left_alone(damage: str, light: Environment, messages):
    hook("enable", "--env", light.root)
    file = light.site / NAME
    text = file.read_text()
    file.unlink()
    if damage == "link":
        (light.root / "elsewhere").write_text(text)
        file.symlink_to(light.root / "elsewhere")
    elif damage == "directory":
        file.mkdir()
    else:
        changed = {
            "torn": text[: len(text) // 2],
            "foreign": "import sys\n",
            "changed": text.replace("raise", "pass"),
            "said": text.replace('"backend": "auto"', '"backend": "cuda"'),
        }
        file.write_text(changed[damage])
        assert file.read_text() != text
    state = light.state()
    for verb in ("enable", "disable"):
        refusal = hook(verb, "--env", light.root, code=3)
        assert str(file) in refusal
        messages(refusal)
    assert light.state() == state


def test_an_environment_on_top_of_one_that_has_it_is_refused_a_second(light: Environment, tmp_path: Path):
    top = Environment(tmp_path / "top", light)
    top.paths(ROOT, PACKAGES)
    hook("enable", "--env", light.root)
    # venv puts an environment on that of the interpreter, not on another venv: as if the base had it.
    settings = top.root / "pyvenv.cfg"
    assert re.search("^include-system.* = true$", settings.read_text(), re.MULTILINE)
    both = f"[*own(), {str(light.site)!r}]"
    program = f"import site; own = site.getsitepackages; site.getsitepackages = lambda: {both}"
    (top.site / "sitecustomize.py").write_text(program)
    said = hook("enable", "--env", top.root, code=3)
    assert str(light.site / NAME) in said and str(top.site) in said
    assert not (top.site / NAME).exists()


def test_an_environment_without_mcore_bundle_is_refused(tmp_path: Path):
    bare = Environment(tmp_path / "bare")
    before = bare.state()
    said = hook("enable", "--env", bare.root, code=3)
    assert "ModuleNotFoundError" in said and f"{bare.python} -m pip install" in said
    assert bare.state() == before


@pytest.mark.parametrize("verb", ["enable", "disable"])
def test_a_read_only_environment_is_refused(verb: str, light: Environment):
    if verb == "disable":
        hook("enable", "--env", light.root)
    state = light.state()
    # As to somebody who may not write there: root may.
    program = "import os, sys; from bundle.cli import main; os.access = lambda *_: False; main()"
    ran = run_bundle("patches", verb, "--env", light.root, program=("-c", program), code=3)
    assert str(light.site) in ran.stderr
    assert light.state() == state


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("--env", "nowhere/python"), "--env nowhere/python"),
        (("--env", "."), "--env ."),
        (("--env", "/bin/false"), "--env /bin/false"),
        (("--features", "mtp,paked"), "paked"),
        (("--vouch", "mtp-zero-layer"), "mtp-zero-layer"),
    ],
)
def test_a_wrong_word_is_named(args: tuple[str, ...], word: str, environment: Environment, messages):
    before = environment.state()
    args = args if "--env" in args else ("--env", str(environment.root), *args)
    refusal = hook("enable", *args, code=2)
    assert word in refusal and environment.state() == before
    messages(refusal)


def test_doctor_names_it(light: Environment):
    def doctor(*args: str) -> str:
        return subprocess.run(
            [light.python, "-m", "bundle", "doctor", *args], capture_output=True, text=True, timeout=300
        ).stdout

    assert NAME not in doctor()
    hook("enable", "--env", light.root, "--features", "mtp")
    assert str(light.site / NAME) in doctor() and "features mtp" in doctor()
    (found,) = [f for f in json.loads(doctor("--json"))["findings"] if f["subject"] == "patches"]
    assert found["level"] == "ok" and str(light.site / NAME) in found["cause"]
    (light.site / NAME).write_text("import sys\n")
    assert "warn  patches" in doctor()


def test_a_rank_of_a_verification_decides_itself(light: Environment):
    hook("enable", "--env", light.root)
    program = (
        "import sys; from bundle.verification import rank\n"
        "names = lambda: [type(finder).__module__ for finder in sys.meta_path]\n"
        "assert 'mcore_bundle_patches' in names()\n"
        "rank.backends.set_up_runtime = lambda backend: print(names()) or sys.exit()\n"
        "rank.main(0, 1, None, 'cpu')\n"
    )
    assert "mcore_bundle_patches" not in light.ran("-c", program).stdout
