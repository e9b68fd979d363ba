"""Imports without garbage collection: nothing is looked through, and all is given back at the exit."""

import json
import subprocess
import sys

PROGRAM = """
import atexit, gc, json
from bundle.imports import pause_gc_and_freeze
phases = []
gc.callbacks.append(lambda phase, info: phases.append(phase))
with pause_gc_and_freeze():
    kept = [[] for _ in range(200_000)]
    with pause_gc_and_freeze():
        pass
    inside = len(phases), gc.isenabled()
gc.callbacks.clear()
is_tracked = any(item is kept for item in gc.get_objects())
outside = gc.isenabled(), is_tracked, gc.get_freeze_count() > 200_000
atexit._run_exitfuncs()
print(json.dumps([*inside, *outside, gc.get_freeze_count()]))
"""


def test_nothing_is_collected_inside_and_all_is_given_back_at_the_exit():
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert json.loads(ran.stdout) == [0, False, True, False, True, 0], ran.stderr[-2000:]
