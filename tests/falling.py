"""Ranks that end as they are told; see test_world.py.

python -m tests.falling WORD
"""

import os
import sys
import time

from tests import world


def case(word: str) -> None:
    if word == "dies" and os.environ[world.RANK] == "1":
        os._exit(3)
    if word in ("dies", "sleeps"):
        time.sleep(600)
    if word == "raises":
        raise ArithmeticError("of a case")


if __name__ == "__main__":
    world.each(((f"the case that {word}", word) for word in sys.argv[1:]), case)
    print("ended")
