"""Rewards as users write them, good and bad: the tests name these by their file."""

import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__)
FOREVER = 1e6


def polite(answers, rows):
    return [float("please" in answer) for answer in answers]


def abstain(answers, rows):
    return [None if answer == "?" else 1 for answer in answers]


def return_column(answers, rows):
    return [row["value"] for row in rows]


def print_much(answers, rows):
    print("x" * 10**6)
    sys.stdout.flush()
    return [True] * len(answers)


def generate(answers, rows):
    yield from (len(answer) for answer in answers)


def generate_forever(answers, rows):
    while True:
        yield 1.0


def hang(answers, rows):
    if "hang" in answers:
        time.sleep(FOREVER)
    return [0.5] * len(answers)


def hang_behind_another(answers, rows):
    """Start a process that would outlive a killed one, and wait for it."""
    if "hang" in answers:
        process = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER})"])
        Path(rows[0]["pid"]).write_text(str(process.pid))
        process.wait()
    return [0.5] * len(answers)


def die(answers, rows):
    if "die" in answers:
        os._exit(7)
    return [0.5] * len(answers)


def leave(answers, rows):
    sys.exit(3)


def raise_error(answers, rows):
    raise ValueError("no " + answers[0])


def return_text(answers, rows):
    return ["1"] * len(answers)


def return_one_text(answers, rows):
    return "1" * len(answers)


def return_few(answers, rows):
    return [1.0] * (len(answers) - 1)


def return_many(answers, rows):
    return [1.0] * (len(answers) + 1)


def return_number(answers, rows):
    return 1.0


def return_nan(answers, rows):
    return [float("nan")] * len(answers)


def return_infinity(answers, rows):
    return [float("-inf")] * len(answers)


def return_lists(answers, rows):
    return [[1.0]] * len(answers)


class Unpleasant(Exception):
    def __str__(self):
        raise RuntimeError


def raise_unpleasant(answers, rows):
    raise Unpleasant


not_a_function = 3
