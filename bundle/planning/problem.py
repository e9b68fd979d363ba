"""A reason why a job cannot run as it is asked for, with what to change and the exit code it deserves."""

from bundle.errors import ExitCode
from bundle.frozen import frozen


@frozen
class Problem:
    """One violation: the recipe's (2), the machine's (3) or the patches' (4)."""

    code: ExitCode
    text: str


def recipe_problem(text: str) -> Problem:
    """The recipe asks for something that cannot be done, wherever it runs."""
    return Problem(ExitCode.USAGE, text)


def hardware_problem(text: str) -> Problem:
    """This machine cannot run it; another one could."""
    return Problem(ExitCode.ENVIRONMENT_UNFIT, text)
