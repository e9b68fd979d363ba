"""Finding definitions by name, as Python would find them."""

import importlib
import inspect
import sys
import time
from pathlib import Path

import pytest

from bundle.patches.definitions import Definitions, EvidenceDefinitions
from bundle.patches.source import SourceTree, UnreadableSource
from tests.patches.trees import written

TREE = {
    "pkg.base": (
        "import functools\n"
        "from typing import Generic, TypeVar\n"
        "T = TypeVar('T')\n"
        "class Root:\n"
        "    def inherited(self): return 'root'\n"
        "    def overridden(self): return 'root'\n"
        "class Base(Root, Generic[T]):\n"
        "    def overridden(self): return 'base'\n"
        "    @staticmethod\n"
        "    def static(a): return a\n"
        "    @classmethod\n"
        "    def made(cls): return cls()\n"
        "def plain(a): return a\n"
        "alias = plain\n"
    ),
    "pkg.middle": "from pkg.base import *\nfrom pkg.base import plain as renamed\nimport pkg.base\n",
    "pkg.sub.__init__": "from .leaf import Leaf\nfrom ..middle import renamed\n",
    "pkg.sub.leaf": (
        "from pkg import base\n"
        "from pkg.middle import Base\n"
        "class Leaf(Base[int]):\n"
        "    def own(self): return 1\n"
        "class Other(base.Root):\n"
        "    if True:\n"
        "        def own(self): return 'yes'\n"
        "    else:\n"
        "        def own(self): return 'no'\n"
    ),
    "pkg.optional": (
        "try:\n"
        "    from nowhere import fast\n"
        "    HAVE = True\n"
        "except ImportError:\n"
        "    fast, HAVE = None, False\n"
        "if HAVE:\n"
        "    def chosen(): return fast\n"
        "else:\n"
        "    def chosen(): return None\n"
    ),
}
# target -> (module it is defined in, how many alternatives)
FOUND = {
    "pkg.base:plain": ("pkg.base", 1),
    "pkg.base:Base.static": ("pkg.base", 1),
    "pkg.base:Base.made": ("pkg.base", 1),
    "pkg.middle:renamed": ("pkg.base", 1),
    "pkg.middle:Base.overridden": ("pkg.base", 1),
    "pkg.sub:renamed": ("pkg.base", 1),
    "pkg.sub:Leaf.own": ("pkg.sub.leaf", 1),
    "pkg.sub:Leaf.inherited": ("pkg.base", 1),
    "pkg.sub.leaf:Leaf.overridden": ("pkg.base", 1),
    "pkg.sub.leaf:Other.inherited": ("pkg.base", 1),
    "pkg.sub.leaf:Other.own": ("pkg.sub.leaf", 2),
    "pkg.optional:chosen": ("pkg.optional", 2),
    "pkg.optional:fast": ("pkg.optional", 2),
    "pkg.base:alias": ("pkg.base", 1),
}


@pytest.mark.parametrize("target", FOUND)
def test_a_name_is_found_where_it_is_defined(tmp_path: Path, target: str):
    found = written(tmp_path, TREE)[target]
    assert found is not None
    assert (found.module, len(found.nodes)) == FOUND[target]


@pytest.mark.parametrize("target", [name for name in FOUND if "optional" not in name and "alias" not in name])
def test_python_finds_it_there_too(tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch):
    written(tmp_path, TREE)
    monkeypatch.syspath_prepend(str(tmp_path))
    module, _, qualified = target.partition(":")
    try:
        found = importlib.import_module(module)
        for name in qualified.split("."):
            found = inspect.unwrap(getattr(found, name))
        assert found.__module__ == FOUND[target][0]
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "pkg"]:
            del sys.modules[name]


@pytest.mark.parametrize(
    "target",
    ["pkg.base:none", "pkg.none:plain", "pkg.base:Base.none", "pkg.base:plain.none", "pkg.sub:Leaf.x.y"],
)
def test_what_is_not_there_is_not_found(tmp_path: Path, target: str):
    assert written(tmp_path, TREE)[target] is None


def test_a_renamed_method_is_named_as_the_nearest(tmp_path: Path):
    definitions = written(tmp_path, TREE)
    own = "pkg.sub.leaf:Leaf.own"
    nearest = {f"{own}s": (own,), "pkg.base:Basis.static": ("pkg.base:Base",), "pkg.none:plain": ()}
    assert {name: definitions.find_nearest(name) for name in nearest} == nearest


def test_a_decorator_is_part_of_the_code(tmp_path: Path):
    plain = written(tmp_path / "a", {"m": "def f(): pass"})["m:f"]
    decorated = written(tmp_path / "b", {"m": "@jit\ndef f(): pass"})["m:f"]
    assert plain is not None and decorated is not None
    assert plain.fingerprint != decorated.fingerprint


def test_circular_imports_and_bases_end(tmp_path: Path):
    tree = {
        "a": "from b import x\nfrom b import *\nclass C(C): pass\nclass D(E): pass\nclass E(D): pass\n",
        "b": "from a import x\nfrom a import *\n",
    }
    definitions = written(tmp_path, tree)
    assert definitions["a:y"] is None
    assert definitions["a:C.x"] is None
    assert definitions["a:D.x"] is None
    assert definitions["a:x"] is not None  # bound, if only in a circle


@pytest.mark.parametrize(
    "source", ["def f(:", "x = " + "(" * 300 + ")" * 300, "x = " + "-" * 200000 + "1", "\0", "x = '\xff"]
)
def test_a_file_that_cannot_be_parsed_is_an_error_that_names_it(tmp_path: Path, source: str):
    definitions = written(tmp_path, {"m": source})
    with pytest.raises(UnreadableSource, match=r"m\.py"):
        definitions["m:f"]


HOSTILE = {
    "empty": b"",
    "byte-order mark": b"\xef\xbb\xbfdef f(): pass\n",
    "CRLF": b"def f():\r\n    pass\r\n",
    "latin-1": b"# -*- coding: latin-1 -*-\nx = '\xe9'\ndef f(): pass\n",
    "an encoding that is none": b"# -*- coding: nonsense -*-\ndef f(): pass\n",
    "UTF-16": "def f(): pass\n".encode("utf-16"),
    "NUL": b"def f(): pass\n\0",
    "Python 2": b"print 'x'\n",
    "nested calls": b"x = " + b"f(" * 5000 + b")" * 5000,
    "unary minus": b"x = " + b"-" * 100_000 + b"1\n",
    "a long sum": b"x = " + b"1 + " * 200_000 + b"1\n",
    "attributes": b"x = a" + b".a" * 50_000 + b"\n",
    "elif": b"if a: pass\n" + b"elif a: pass\n" * 3000 + b"def f(): pass\n",
}
READ = {"byte-order mark", "CRLF", "latin-1"}


@pytest.mark.parametrize("kind", HOSTILE)
def test_whatever_a_file_holds_it_is_read_or_named_in_time(tmp_path: Path, kind: str):
    (tmp_path / "m.py").write_bytes(HOSTILE[kind])
    definitions, started = Definitions(SourceTree(tmp_path)), time.process_time()
    try:
        found = definitions["m:f"]
        definitions.find_nearest("m:g")
    except UnreadableSource as error:
        found = None
        assert "m.py" in str(error)
    assert time.process_time() - started < 10
    assert found is not None or kind not in READ


def test_a_huge_file_is_not_read(tmp_path: Path):
    definitions = written(tmp_path, {"m": "x = 1\n" * (400 << 10)})
    with pytest.raises(UnreadableSource, match="MiB"):
        definitions["m:x"]


def test_a_defect_reads_only_what_its_patch_declares(tmp_path: Path):
    evidence = EvidenceDefinitions(written(tmp_path, TREE), frozenset({"pkg.base:plain"}))
    assert evidence["pkg.base:plain"] is not None
    with pytest.raises(KeyError, match="not declared"):
        evidence["pkg.base:alias"]


def test_questions_about_a_function(tmp_path: Path):
    source = "def f(a, *, b=1, **rest):\n    g(a)\n    a.g(b, key=2)\n    return a.attribute\n"
    found = written(tmp_path, {"m": source})["m:f"]
    assert found is not None
    assert found.parameters == {"a", "b"}
    assert len(found.find_calls("g")) == 2
    assert {"a", "b", "g", "key", "attribute"} <= found.identifiers


def test_mutual_star_imports_end_at_once(tmp_path: Path):
    names = [f"m{i}" for i in range(12)]
    tree = {name: "".join(f"from {other} import *\n" for other in names) for name in names}
    tree["m11"] += "def there(): pass\n"
    definitions = written(tmp_path, tree)
    assert definitions["m0:nowhere"] is None and definitions.find_bindings("m0:nowhere") == ()
    assert definitions["m0:there"] is not None and len(definitions.find_bindings("m0:there")) == 1


@pytest.mark.parametrize(("modules", "size"), [(400, 0), (6, 1000 << 10)])
def test_a_tree_of_very_many_modules_is_not_read_to_its_end(
    tmp_path: Path, modules: int, size: int, messages
):
    tree = {f"m{i}": f"from m{i + 1} import *\n" + "#" * size for i in range(modules)}
    definitions = written(tmp_path, tree | {f"m{modules}": "x = 1\n"})
    with pytest.raises(UnreadableSource, match="256 modules") as error:
        definitions.find_bindings("m0:x")
    messages(error.value)


def test_mutual_inheritance_ends_at_once(tmp_path: Path):
    names = [f"C{i}" for i in range(12)]
    tree = {"m": "".join(f"class {name}({', '.join(names)}): pass\n" for name in names)}
    assert written(tmp_path, tree)["m:C0.nowhere"] is None


@pytest.mark.parametrize("last", ["def f(): pass\n", ""])
def test_a_legal_chain_of_star_imports_is_followed_once(tmp_path: Path, last: str):
    """28 levels of two modules each, every one importing all of both of the next level."""
    tree: dict[str, str] = {}
    for level in range(28):
        stars = f"from a{level + 1} import *\nfrom b{level + 1} import *\n" if level < 27 else ""
        tree |= {f"a{level}": stars, f"b{level}": stars}
    tree["b27"] = last
    assert (written(tmp_path, tree)["a0:f"] is not None) == bool(last)


def test_a_diamond_of_bases_is_searched_once_and_found(tmp_path: Path):
    levels = "class A0:\n    def f(self): pass\nclass B0: pass\n"
    for level in range(1, 29):
        levels += f"class A{level}(B{level - 1}, A{level - 1}): pass\n"
        levels += f"class B{level}(B{level - 1}, A{level - 1}): pass\n"
    definitions = written(tmp_path, {"m": levels})
    assert definitions["m:A28.f"] is not None and definitions["m:A28.g"] is None


def test_a_chain_without_end_is_given_up(tmp_path: Path):
    tree = {f"m{i}": f"from m{i + 1} import f\nclass C{i}(C{i + 1}): pass\n" for i in range(2000)}
    found = written(tmp_path, tree)["m0:f"]
    assert found is not None and found.module != "m0"  # as far as we go


ALIASES = {
    "pkg.__init__": "",
    "pkg.impl": "def f(a): return a\nclass C:\n    def m(self): pass\n    @staticmethod\n    def s(): pass\n",
    "pkg.user": (
        "from pkg import impl as i\nimport pkg.impl\nimport pkg.impl as whole\nfrom .impl import C\n"
        "f = i.f\ng = pkg.impl.f\nh = whole.f\nk = f\nm = C.m\nD = C\nx = y = i.f\n"
        "if f:\n    either = i.f\nelse:\n    either = None\n"
        "loop = loop2\nloop2 = loop\nself_ = self_\nnone = i.nothing\n"
    ),
    "pkg.starred": "from .user import *\n",
}


@pytest.mark.parametrize("name", ["f", "g", "h", "k", "x", "y"])
@pytest.mark.parametrize("module", ["pkg.user", "pkg.starred"])
def test_a_name_bound_by_assignment_is_what_it_was_bound_to(tmp_path: Path, module: str, name: str):
    definitions = written(tmp_path, ALIASES)
    found = definitions[f"{module}:{name}"]
    assert found == definitions["pkg.impl:f"]


def test_attributes_of_an_alias_are_found(tmp_path: Path):
    definitions = written(tmp_path, ALIASES)
    assert definitions["pkg.user:m"] == definitions["pkg.user:D.m"] == definitions["pkg.impl:C.m"]
    either = definitions["pkg.user:either"]
    assert either is not None and len(either.nodes) == 2  # a variable
    for name in ("loop", "self_", "none"):
        variable = definitions[f"pkg.user:{name}"]
        assert variable is not None and variable.module == "pkg.user"


def test_a_name_of_several_is_bound_to_its_own_value(tmp_path: Path):
    one = written(tmp_path / "a", {"m": "a, b = (None, None)\nc, d = f()\n"})
    other = written(tmp_path / "b", {"m": "a, x, b = [None, 1, None]\nd, c = f()\n"})
    for name, same in (("b", True), ("c", False)):
        mine, theirs = one[f"m:{name}"], other[f"m:{name}"]
        assert mine is not None and theirs is not None
        assert (mine.fingerprint == theirs.fingerprint) == same


def test_bindings_are_found_behind_import_star(tmp_path: Path):
    tree = {
        "pkg.__init__": "from .front import *\n",
        "pkg.front": "from ._impl import *\n",
        "pkg._impl": "try:\n    from te import Linear\nexcept ImportError:\n    Linear = None\n",
    }
    definitions = written(tmp_path, tree)
    assert (
        len(definitions.find_bindings("pkg:Linear"))
        == len(definitions.find_bindings("pkg._impl:Linear"))
        == 2
    )
