"""Judges answers in a process of its own; runs as a script: child.py FILE_DESCRIPTOR PARENT, then messages.

It imports nothing of this package, so that it starts at once, and it ends with the process that started it.
Messages to it are pickled, by that process alone; what it answers is JSON, since a reward may be anybody's.
The first message says what it judges with; it answers {"notice": text for the log} or {"error", "reason"}.
Then come answers with their rows; for each run of answers it sends {"verdicts": [value]}: a number, null, or
[kind of failure, reason].
"""

import ctypes
import importlib.util
import json
import logging
import math
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

# Of the process that compares mathematics: `9^9^9^9` would take all that there is.
MATH_MEMORY_BYTES = 2**31
REASON_LENGTH = 300
_PR_SET_PDEATHSIG = 1

Judge = Callable[[list[str], list[Any]], Iterator[list[Any]]]


class NoFunction(Exception):
    """Why a file has no such function."""

    is_explained = True


def end_with_parent(parent: int) -> None:
    """Let the kernel end this process when the thread that started it ends; on Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def has_self_explanatory_text(error: BaseException) -> bool:
    """Return whether the text of an error says everything, so that its type is not shown."""
    return "is_explained" in vars(type(error))


def describe_error(error: BaseException) -> str:
    """Return the type and the text of an error, of bounded length."""
    try:
        text = str(error) if has_self_explanatory_text(error) else f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  # __str__ is somebody else's
        text = type(error).__name__
    return text[:REASON_LENGTH]


def load_module(path: Path) -> ModuleType:
    """Return the module of a file, whatever imports would find by its name."""
    spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look there
    spec.loader.exec_module(module)
    return module


def load_function(file: str, name: str) -> Callable[[list[str], list[Any]], Any]:
    """Return the function of a file, whose neighbours it may import. Raise NoFunction where there is none."""
    path = Path(file).resolve()
    if not path.exists():
        raise NoFunction("there is no such file")
    sys.path.insert(0, str(path.parent))
    function: Callable[[list[str], list[Any]], Any] | None = getattr(load_module(path), name, None)
    if not callable(function):
        raise NoFunction(f"the file defines no function {name!r}")
    return function


def to_verdict(value: Any) -> Any:
    """Return the verdict for what a function returned for an answer: a number, None, or a failure."""
    if value is None:
        return None
    if isinstance(value, str | bytes):
        return ["text", f"it returned the text {value[:60]!r} for an answer instead of a number"]
    try:
        number = float(value)
    except Exception as error:  # noqa: BLE001  # __float__ is somebody else's
        cause = "" if isinstance(error, TypeError) else f" ({describe_error(error)})"
        name = type(value).__name__
        return ["not_a_number", f"it returned a {name} for an answer instead of a number{cause}"]
    if math.isfinite(number):
        return number
    return ["not_a_number", f"it returned {number} for an answer, which is not a finite number"]


def compute_function_verdicts(function: Callable[..., Any], answers: list[str], rows: list[Any]) -> list[Any]:
    """Return a verdict on each answer by one call of a function."""
    try:
        returned = function(answers, rows)
        if isinstance(returned, str | bytes | dict) or not hasattr(returned, "__iter__"):
            name = type(returned).__name__
            reason = f"it must return a list with one reward per answer, but returned a value of type {name}"
            failure = ["wrong_count", reason]
            return [failure] * len(answers)
        values = list(islice(iter(returned), len(answers) + 1))
        if len(values) != len(answers):
            count = f"more than {len(answers)}" if len(values) > len(answers) else len(values)
            returned_count = f"{count} rewards for {len(answers)} answers"
            failure = ["wrong_count", f"it must return one reward per answer, but returned {returned_count}"]
            return [failure] * len(answers)
        return [to_verdict(value) for value in values]
    except BaseException as error:  # noqa: BLE001  # SystemExit too
        verb = "" if has_self_explanatory_text(error) else "it raised "
        return [["raised", f"{verb}{describe_error(error)}"]] * len(answers)


def judge_math(answer: str, reference: str) -> Any:
    """Return the verdict on an answer whose right value is `reference`, both in words, LaTeX or numbers."""
    from math_verify import parse, verify

    try:
        # Time is limited from outside: math-verify would use signals. Its errors would count as wrong.
        gold = parse(reference, parsing_timeout=None, raise_on_error=True)
        if not gold:
            return ["raised", f"math-verify finds no value in the reference answer {reference[:60]!r}"]
        value = parse(answer, parsing_timeout=None, raise_on_error=True)
        return float(verify(gold, value, timeout_seconds=None, raise_on_error=True))
    except BaseException as error:  # noqa: BLE001  # RecursionError, MemoryError, and what sympy raises
        return ["raised", f"math-verify cannot compare the answer ({describe_error(error)})"]


def judge_code(judge: Callable[[str, list[str]], float], answer: str, tests: list[str]) -> Any:
    """Return the verdict on an answer by its tests; without a sandbox it is a failure."""
    try:
        return judge(answer, tests)
    except BaseException as error:  # noqa: BLE001  # a machine without memory, processes or files
        return ["raised", f"the sandbox cannot run the program of the answer ({describe_error(error)})"]


def build_judge_and_notice(setting: dict[str, Any]) -> tuple[Judge, str]:
    """Return what judges answers, run by run (one answer at a time, or all in one call), and a notice."""
    if setting["kind"] == "math":
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the missing time-outs
        judge_math("1", "1")  # the imports, and a first parse
        resource.setrlimit(resource.RLIMIT_AS, (MATH_MEMORY_BYTES, MATH_MEMORY_BYTES))
        return lambda answers, rows: ([judge_math(*pair)] for pair in zip(answers, rows, strict=True)), ""
    folder = Path(__file__).parent
    if setting["kind"] == "code":
        judge = load_module(folder / "code.py").CodeJudge(setting["seconds"], setting["memory_gib"])
        return lambda answers, rows: (
            [judge_code(judge.judge, *pair)] for pair in zip(answers, rows, strict=True)
        ), judge.notice
    if setting["kind"] == "http":
        function = load_module(folder / "http.py").HttpReward(setting["url"], setting["seconds"]).judge
    else:
        function = load_function(setting["file"], setting["name"])
    return lambda answers, rows: iter([compute_function_verdicts(function, answers, rows)]), ""


def main() -> None:
    """Answer messages until there are no more."""
    end_with_parent(int(sys.argv[2]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(2, 1)  # what a reward prints goes to the log
    connection = Connection(int(sys.argv[1]))
    try:
        judge, notice = build_judge_and_notice(connection.recv())
    except BaseException as error:  # noqa: BLE001  # the file is somebody else's
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "math_verify"
        kind = "not_installed" if is_missing else "raised"
        connection.send_bytes(json.dumps({"error": kind, "reason": describe_error(error)}).encode())
        return
    connection.send_bytes(json.dumps({"notice": notice}).encode())
    while True:
        try:
            answers, rows = connection.recv()
        except EOFError:
            return
        for verdicts in judge(answers, rows):
            connection.send_bytes(json.dumps({"verdicts": verdicts}).encode())


if __name__ == "__main__":
    main()
