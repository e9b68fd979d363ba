"""What is wrong with the data: everything, by file, line and field, up to a limit."""

from bundle.errors import JobFailed

# Enough to see the pattern; a wholly corrupt file would otherwise print a line per row.
SHOWN = 20


class Problems:
    """Collects corrupt rows and files; whether they stop the job is the recipe's `data.on_error`."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.count = 0
        self.first: list[str] = []

    def add(self, place: str, reason: str) -> None:
        """Records one corrupt row or file; `place` is "file:line" or "file"."""
        self.count += 1
        if len(self.first) < SHOWN:
            self.first.append(f"{place}: {reason}")

    def shown(self) -> list[str]:
        """The first problems, and how many more there are."""
        more = [f"and {self.count - SHOWN} more"] if self.count > SHOWN else []
        return [*self.first, *more]

    def settle(self) -> None:
        """Raises JobFailed with what was found, unless the policy is to skip."""
        if self.count and self.policy == "stop":
            what = f"the data has {self.count} corrupt rows or files"
            raise JobFailed(f"{what}; mend them, or set data.on_error: skip", self.shown())
