"""Where 0.12 puts an embedding that pipeline stages share, without the patch and with it."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patches.trees import Release

pytestmark = [pytest.mark.matrix, pytest.mark.usefixtures("megatron")]


def places(tree: Path, how: str, cases: list[Any]) -> list[Any]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), str(tree)])}
    command = [sys.executable, "-m", "tests.replacements.buffers", how]
    ran = subprocess.run(
        command, env=environ, input=json.dumps(cases), capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout)  # type: ignore[no-any-return]


def drawn(count: int) -> list[Any]:
    """Cases of every kind: ranks that divide 64, that do not, and more than 128; buckets of any fill."""
    draw = random.Random(0)
    cases = []
    for _ in range(count):
        sizes = [draw.choice((1, 16, 64, 100, 128, 192, 640)) for _ in range(draw.randint(1, 6))]
        ranks = draw.choice((1, 2, 3, 8, 64, 192))
        cases.append((ranks, draw.choice((None, 1, 200)), sizes, draw.randrange(len(sizes))))
    return cases


def overlaps(case: Any, where: Any) -> bool:
    """Whether the shared parameter begins before its bucket."""
    parameters, buckets = where
    first, _, bucket = parameters[case[3]]
    return bool(first < buckets[bucket][0])


def test_it_begins_where_0_13_puts_it(release: Release):
    """Without the patch too early, if what is before it ends at 64 modulo 128; nothing else moves."""
    inside = [(2, None, [64, 1000], 1), (64, None, [128, 1, 500], 2)]
    outside = [(2, None, [128, 1000], 1), (2, None, [1000, 64], 0), (3, None, [64, 1000], 1)]
    cases = inside + outside + drawn(300)
    stock, patched = (places(release("0.12.3"), how, cases) for how in ("stock", "patched"))
    assert patched == places(release("0.13.1"), "stock", cases)
    wrong = [overlaps(case, where) for case, where in zip(cases, stock, strict=True)]
    assert wrong[:5] == [True, True, False, False, False]
    assert 20 < sum(wrong) < 280
    right = [index for index, overlapping in enumerate(wrong) if not overlapping]
    assert [stock[index] for index in right] == [patched[index] for index in right]
    assert not any(overlaps(case, where) for case, where in zip(cases, patched, strict=True))
