"""Applying and taking back, on a small package of our own, in processes of their own."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

PACKAGE = {
    "pkg/__init__.py": "",
    "pkg/low.py": """
        def f(x): return x + 1
        def decorated(x): return x
        class Base:
            def method(self, x): return x
            @staticmethod
            def static(x): return x
            @classmethod
            def made(cls, x): return (cls.__name__, x)
        class Leaf(Base): pass
        try:
            from nowhere import fast
        except ImportError:
            pass
        try:
            from nowhere import linear
        except ImportError:
            linear = None
        empty = None
    """,
    "pkg/high.py": "from pkg.low import f\nfrom pkg.low import f as g\nvalues = [f]\n",
    "outside.py": "from pkg.low import f\n",
    "wrappers.py": """
        import functools
        def tens(original):
            @functools.wraps(original)
            def wrapped(*args, **kwargs):
                result = original(*args, **kwargs)
                return (*result, 10) if isinstance(result, tuple) else result + 10
            return wrapped
        def hundreds(original):
            @functools.wraps(original)
            def wrapped(*args, **kwargs): return original(*args, **kwargs) + 100
            return wrapped
        def value(original): return ('value', original)
        def broken(original): raise ValueError('broken')
    """,
}
START = """
import json, sys
from pathlib import Path
from bundle.errors import PatchError
from bundle.patches import patcher, source
from bundle.patches.definitions import Definitions
from bundle.patches.plan import PatchPlan, PatchStep
from bundle.patches.source import SourceTree
root = Path.cwd()
definitions = Definitions(SourceTree(root))
def plan(*pairs):
    steps = []
    for number, (target, wrapper) in enumerate(pairs):
        module, _, name = target.partition(':')
        found = definitions[target]
        steps.append(PatchStep(
            patch=f'p{number}', target=target, wrapper=f'wrappers:{wrapper}',
            file=source.find_module_file(root, module),
            file_digest=source.compute_module_digest(root, module),
            code_file=found.file, fingerprint=found.fingerprint, wrapper_digest='',
            everywhere='.' not in name and found.module == module and found.is_function_or_class))
    return PatchPlan('0', None, (), tuple(steps))
def fails(action, *args):
    try: action(*args)
    except PatchError as error: return str(error)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    return tmp_path


def run(package: Path, script: str) -> Any:
    """What the script leaves in `out`."""
    source = START + textwrap.dedent(script) + "\nprint(json.dumps(out))\n"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), str(Path.cwd())])}
    command = [sys.executable, "-c", source]
    ran = subprocess.run(command, cwd=package, env=environ, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


LAZY = "patcher.apply(plan(('pkg.low:f', 'tens')))\n"
IMPORTS = "import pkg.low, pkg.high, outside\n"
PENDING = "out = [pkg.low.f(1), patcher.list_pending_modules()]"
LANDED = "out = [pkg.low.f(1), patcher.list_applied_targets()]"


@pytest.mark.parametrize("order", ["before", "between", "after"])
def test_every_import_order_reaches_every_module_of_the_package(package: Path, order: str):
    scripts = {
        "before": LAZY + IMPORTS,
        "between": "import pkg.low\n" + LAZY + IMPORTS,
        "after": IMPORTS + LAZY,
    }
    out = run(package, scripts[order] + "out = [pkg.low.f(1), pkg.high.f(1), pkg.high.g(1), outside.f(1)]")
    # who imported by value before us from outside of the package keeps what it has
    assert out == [12, 12, 12, 2 if order == "after" else 12]


def test_nothing_is_imported_to_be_patched(package: Path):
    out = run(
        package,
        LAZY + "out = ['pkg.low' in sys.modules, 'wrappers' in sys.modules, patcher.list_pending_modules()]",
    )
    assert out == [False, False, ["pkg.low"]]


def test_applied_twice_is_applied_once(package: Path):
    out = run(package, IMPORTS + LAZY + LAZY + LANDED)
    assert out == [12, ["pkg.low:f"]]


def test_another_plan_is_refused(package: Path, messages):
    out = run(package, IMPORTS + LAZY + "out = fails(patcher.apply, plan(('pkg.low:f', 'hundreds')))")
    assert out is not None
    messages(out)


def test_wrappers_stand_in_the_order_of_the_plan(package: Path):
    script = "patcher.apply(plan(('pkg.low:f', 'tens'), ('pkg.low:f', 'hundreds')))\nout = []\n"
    script += "from pkg.high import f\nout = [f(1), f.__wrapped__(1), f.__wrapped__.__wrapped__(1)]"
    assert run(package, script) == [112, 12, 2]


KINDS = {
    "low:f": "tens",
    "low:Base.method": "tens",
    "low:Base.static": "tens",
    "low:Base.made": "tens",
    "low:Leaf.method": "tens",
    "high:f": "tens",
    "low:linear": "value",
    "low:fast": "value",  # the tree binds the name in a branch that this Python does not take
}
OWNER = """
*parents, name = {path!r}.split('.')
owner = importlib.import_module({module!r})
for parent in parents: owner = getattr(owner, parent)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_revert_restores_the_very_descriptor(package: Path, kind: str):
    module, _, path = f"pkg.{kind}".partition(":")
    script = "import importlib, pkg.low, pkg.high\n" + OWNER.format(module=module, path=path)
    script += f"""
names = [dict(vars(module)) for module in (pkg.low, pkg.high)]
before = vars(owner).get(name, 'absent')
patcher.apply(plan(('pkg.{kind}', '{KINDS[kind]}')))
now = vars(owner)[name]
patcher.revert()
out = [now is before, vars(owner).get(name, 'absent') is before, patcher.list_applied_targets(),
       [dict(vars(module)) for module in (pkg.low, pkg.high)] == names]
"""
    assert run(package, script) == [False, True, [], True]


@pytest.mark.parametrize("kind", [kind for kind, wrapper in KINDS.items() if wrapper == "tens"])
def test_revert_takes_off_what_was_put_on_while_importing(package: Path, kind: str):
    module, _, path = f"pkg.{kind}".partition(":")
    script = f"import importlib, inspect\npatcher.apply(plan(('pkg.{kind}', 'tens')))\n"
    script += OWNER.format(module=module, path=path)
    script += """
def depth(): return 0 if inspect.unwrap(function := getattr(owner, name)) is function else 1
put_on = depth()
patcher.revert()
out = [put_on, depth(), patcher.list_pending_modules()]
"""
    assert run(package, script) in ([1, 0, []], [1, 0, ["pkg.low"]])


def test_revert_forgets_what_is_not_imported_yet(package: Path):
    script = LAZY + "patcher.revert()\n" + IMPORTS
    assert run(package, script + PENDING) == [2, []]


def test_methods_of_every_kind_are_wrapped(package: Path):
    script = """
    patcher.apply(plan(*((f'pkg.low:{name}', 'tens') for name in
        ('Base.method', 'Base.static', 'Base.made', 'Leaf.method'))))
    from pkg.low import Base, Leaf
    out = [Base().method(1), Base.static(1), Base().static(1), Base.made(1), Leaf.made(1), Leaf().method(1)]
    """
    assert run(package, script) == [11, 11, 11, ["Base", 1, 10], ["Leaf", 1, 10], 21]


def test_a_reexported_name_is_replaced_in_that_namespace_only(package: Path):
    out = run(
        package,
        "patcher.apply(plan(('pkg.high:f', 'tens')))\n"
        + IMPORTS
        + "out = [pkg.low.f(1), pkg.high.f(1), pkg.high.g(1)]",
    )
    assert out == [2, 12, 2]


def test_a_variable_is_not_replaced_where_others_hold_the_same_value(package: Path):
    script = (
        IMPORTS + "patcher.apply(plan(('pkg.low:linear', 'value')))\nout = [pkg.low.linear, pkg.low.empty]"
    )
    assert run(package, script) == [["value", None], None]


def test_a_stranger_on_top_is_not_taken_off(package: Path, messages):
    script = (
        IMPORTS
        + LAZY
        + """
mine = pkg.low.f
def strange(x): return mine(x)
pkg.low.f = strange
first = fails(patcher.revert)
kept = pkg.low.f is strange and pkg.high.f is mine
pkg.low.f = mine
pkg.high.g = strange
second = fails(patcher.revert)
pkg.high.g = mine
patcher.revert()
out = [first, kept, second, pkg.low.f(1), pkg.high.g(1)]
"""
    )
    first, kept, second, *after = run(package, script)
    assert all("pkg.low:f" in refusal and "strange" in refusal for refusal in (first, second))
    assert "pkg.high" in second and kept
    assert after == [2, 2]
    messages(first)
    messages(second)


def test_code_that_somebody_replaced_before_us_is_not_wrapped(package: Path, messages):
    script = (
        IMPORTS
        + "pkg.low.f = lambda x: x\nout = ["
        + f"fails(lambda: exec({LAZY!r})), patcher.list_applied_targets()]"
    )
    reason, left = run(package, script)
    assert "pkg.low:f" in reason and left == []
    messages(reason)


def test_code_that_somebody_wrapped_before_us_is_wrapped_again(package: Path):
    script = (
        IMPORTS + "import wrappers\npkg.low.f = wrappers.hundreds(pkg.low.f)\n" + LAZY + "out = pkg.low.f(1)"
    )
    assert run(package, script) == 112


def test_a_file_that_changed_since_the_plan_is_not_patched(package: Path, messages):
    script = "planned = plan(('pkg.low:f', 'tens'))\nfile = root / 'pkg/low.py'\n"
    script += "file.write_text(file.read_text() + '#')\n" + IMPORTS + "out = fails(patcher.apply, planned)"
    reason = run(package, script)
    assert "p0: " in reason and "pkg/low.py" in reason
    messages(reason)


def test_a_lazy_failure_fails_the_import_and_leaves_no_module(package: Path):
    script = "planned = plan(('pkg.low:f', 'tens'))\nfile = root / 'pkg/low.py'\n"
    script += "file.write_text(file.read_text() + '#')\npatcher.apply(planned)\n"
    script += "out = [fails(__import__, 'pkg.low'), 'pkg.low' in sys.modules, fails(__import__, 'pkg.low')]"
    reason, imported, again = run(package, script)
    assert "planned" in reason and not imported and again == reason


def test_a_module_that_was_looked_for_is_patched_when_it_is_imported(package: Path):
    script = LAZY + "import importlib.util\nimportlib.util.find_spec('pkg.low')\n" + IMPORTS
    assert run(package, script + PENDING) == [12, []]


def test_a_module_whose_first_import_failed_is_patched_when_it_is_imported(package: Path):
    """As where megatron tries an import that depends on one which is not there yet."""
    with (package / "pkg/low.py").open("a") as file:
        file.write("\nimport sys\nif not hasattr(sys, 'ready'): raise ImportError('not yet')\n")
    script = LAZY + "try: import pkg.low\nexcept ImportError: sys.ready = True\n" + IMPORTS
    assert run(package, script + LANDED) == [12, ["pkg.low:f"]]


def test_what_an_import_that_was_refused_had_replaced_is_as_it_was(package: Path):
    script = """
    patcher.apply(plan(('pkg.low:f', 'tens'), ('pkg.low:Base.method', 'broken')))
    def refused():
        try: import pkg.low
        except ValueError as error:
            return [str(error), patcher.list_applied_targets(), patcher.list_pending_modules()]
    out = [refused(), refused()]
    patcher.revert()
    import pkg.low
    out.append(pkg.low.f(1))
    """
    refused = ["broken", [], ["pkg.low"]]
    assert run(package, script) == [refused, refused, 2]


def test_a_failure_in_the_middle_changes_nothing(package: Path):
    script = (
        IMPORTS
        + """
before = pkg.low.f
try: patcher.apply(plan(('pkg.low:f', 'tens'), ('pkg.low:Base.method', 'broken')))
except ValueError as error: reason = str(error)
out = [reason, pkg.low.f is before, pkg.high.g is before, patcher.list_applied_targets()]
"""
    )
    assert run(package, script) == ["broken", True, True, []]


def test_a_patched_module_looks_like_any_other(package: Path):
    script = (
        LAZY
        + IMPORTS
        + """
import inspect
spec = pkg.low.__spec__
same = spec.loader is pkg.low.__loader__
out = [type(pkg.low.__loader__).__name__, same, 'def f' in inspect.getsource(pkg.low.f)]
"""
    )
    assert run(package, script) == ["SourceFileLoader", True, True]
