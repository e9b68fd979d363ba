"""A program that imports modules of a framework, in which the patches are enabled; prints where each stops.

Fails where a patch is not on what was imported, or the framework holds what a patch replaces.
"""

import importlib
import sys

from bundle.patches import applying

for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        print("imported", name)
    except ImportError as error:
        print("stopped", name, "at", error)
plan = applying.in_force()
assert plan is not None
planned = [step.target for step in plan.steps if step.target.partition(":")[0] in sys.modules]
assert sorted(applying.applied()) == sorted(planned), (applying.applied(), planned)
for target in planned:
    owner = sys.modules[target.partition(":")[0]]
    *path, last = target.partition(":")[2].split(".")
    for part in path:
        owner = getattr(owner, part)
    now = getattr(owner, last)
    code = getattr(now, "__code__", None)  # there is none of a value; a wrapper may leave what it is given
    theirs = code is not None and not any(d in code.co_filename for d in ("/bundle/", "/megatron/core/"))
    assert not theirs, f"{target} is another's: {now}"
    before = getattr(now, "__wrapped__", owner)
    if getattr(before, "__module__", owner.__name__) != target.partition(":")[0]:
        continue  # a name of another module's, replaced here only; others have it from its home
    frameworks = {name.partition(".")[0] for name in sys.argv[1:]}
    for module in [m for name, m in list(sys.modules.items()) if name.partition(".")[0] in frameworks]:
        assert before not in [v for v in vars(module).values() if callable(v)], f"{module.__name__}: {target}"
print("patched", *planned)
