"""The words of `mcore-bundle train` that say which job: those a person types, and those that ranks get."""

from collections.abc import Sequence
from pathlib import Path


def job_words(recipe: str, overrides: Sequence[str], allow_drift: Sequence[str]) -> list[str]:
    """The verb with a recipe and what is laid over it."""
    words = ["train", recipe]
    for override in overrides:
        words += ["--set", override]
    for drifted in allow_drift:
        words += ["--allow-drift", drifted]
    return words


def rank_words(words: Sequence[str], directory: Path, backend: str) -> list[str]:
    """What every rank is started with: the job, where its run lives, and the backend that was decided on."""
    return [*words, f"--run-directory={directory}", f"--backend={backend}"]
