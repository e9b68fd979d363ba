"""Prints how the decisions over a Megatron-LM history agree with the truth: `python -m tests.history GIT`."""

import sys
from collections import Counter
from pathlib import Path

from tests.history.decided import Decided
from tests.history.git import Repository
from tests.history.tally import UNDECIDED, WRONG, Row, Truth, held_out, rows, transitions, undecided


def main(path: str) -> None:
    """Prints the totals of each branch, each entry's, and every change of a decision on main and dev."""
    repository = Repository(Path(path))
    decided, truth = Decided(repository), Truth(repository)
    found = {
        branch: rows(repository, commits, decided, truth) for branch, commits in held_out(repository).items()
    }
    repository.close()
    for branch, of in found.items():
        print(f"{branch:<14}{len(of) // max(1, len({row.entry for row in of})):>5} commits  {_totals(of)}")
    everything = [row for of in found.values() for row in of]
    for entry in dict.fromkeys(row.entry for row in everything):
        print(f"\n{entry}: {_totals([row for row in everything if row.entry == entry])}")
        for branch in ("main", "dev"):
            for row in transitions(found.get(branch, ()), entry):
                print(f"  {branch:<5}{row.commit[:10]}  {row.action or '-':<9}{row.verdict}")


def _totals(of: list[Row]) -> str:
    counts = Counter(
        (row.verdict, str(row.action or "none"), "present" if row.present else "absent") for row in of
    )
    said = ", ".join(f"{' '.join(key)} {count}" for key, count in sorted(counts.items()))
    wrong = sum(count for (verdict, *_), count in counts.items() if verdict == WRONG)
    there = counts[UNDECIDED, "DRIFT", "present"]
    return f"wrong {wrong}, undecided {undecided(of):.1%} ({there}): {said}"


if __name__ == "__main__":
    main(sys.argv[1])
