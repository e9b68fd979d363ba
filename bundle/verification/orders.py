"""What the parent tells its ranks to run, and what they answer, as JSON files in one directory."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bundle import files
from bundle.patches import plan
from bundle.patches.plan import PatchPlan
from bundle.verification.result import Observation

_ORDERS, _PLAN = "orders.json", "patches.json"


@dataclass(frozen=True, slots=True)
class Order:
    """One run of a measurement with these patches applied."""

    number: int
    measurement: str
    world: int
    seconds: float
    patches: tuple[str, ...]  # ids

    def ranks(self, processes: int) -> tuple[int, ...]:
        """Which of the processes take part; runs of one rank are shared out among them."""
        return tuple(range(self.world)) if self.world > 1 else (self.number % processes,)


def write_orders(directory: Path, orders: Sequence[Order], of: PatchPlan) -> None:
    """Lays the orders down, and the plan of all patches that they may name."""
    (directory / _PLAN).write_text(json.dumps(of.dump()))
    (directory / _ORDERS).write_text(json.dumps([asdict(order) for order in orders]))


def read_orders(directory: Path) -> list[Order]:
    """The orders, in the order in which they run."""
    return [
        Order(**(order | {"patches": tuple(order["patches"])}))
        for order in json.loads((directory / _ORDERS).read_text())
    ]


def read_plan(directory: Path, order: Order) -> PatchPlan:
    """The plan that applies this order's patches."""
    whole = plan.load(json.loads((directory / _PLAN).read_text()))
    return replace(whole, steps=tuple(step for step in whole.steps if step.patch in order.patches))


def scratch(directory: Path, order: Order) -> Path:
    """The directory of one run: its files, its store."""
    return directory / str(order.number)


def answer(directory: Path, order: Order, rank: int, seen: Observation) -> None:
    """Lays down what a rank saw; the first answer stands."""
    file = _file(directory, order, rank)
    if not file.exists():
        files.write_json(file, asdict(seen))


def answers(directory: Path, order: Order, processes: int) -> list[Observation]:
    """What the ranks saw; fewer than there are ranks if some never answered."""
    files = (_file(directory, order, rank) for rank in order.ranks(processes))
    return [Observation(**json.loads(file.read_text())) for file in files if file.exists()]


def _file(directory: Path, order: Order, rank: int) -> Path:
    return directory / f"{order.number}.{rank}.json"
