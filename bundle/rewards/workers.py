"""The rewards that processes judge: math, an answer at a time, and functions of a file, all in one call."""

from collections.abc import Mapping, Sequence
from typing import Any

from bundle.recipe.rl import RLReward
from bundle.recipe.rl_rules import split_function
from bundle.rewards.judging import Failure, Verdict
from bundle.rewards.process import RewardProcess
from bundle.rewards.references import MissingReference, find_reference


class WorkerJudge:
    """A reward whose processes share out the answers: each has a stretch of them, of equal length."""

    def __init__(self, reward: RLReward, fields: Sequence[str]) -> None:
        """Start the processes of a reward of kind math or python; `fields` may have the right answer."""
        self._reward, self._fields = reward, fields
        setting: dict[str, str] = {"kind": reward.kind}
        if reward.function is not None:
            setting["file"], setting["name"] = split_function(reward.function)
        self.processes = tuple(
            RewardProcess(setting, reward.timeout_seconds, one_by_one=reward.kind == "math")
            for _ in range(reward.processes)
        )
        self._verdicts: list[Verdict] = []
        self._places: list[int] = []  # of the answers that processes judge

    def begin(self, answers: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
        """Hand the answers to the processes; `collect` has the verdicts when none is asked any more."""
        self._verdicts, self._places = [None] * len(answers), []
        materials: list[Any] = []  # what each answer is judged by: its row, or the right answer
        for place, row in enumerate(rows):
            try:
                materials.append(row if self._reward.kind == "python" else self._find_reference(row))
                self._places.append(place)
            except MissingReference as error:
                self._verdicts[place] = Failure("raised", str(error))
        texts = [answers[place] for place in self._places]
        bounds = [len(texts) * part // len(self.processes) for part in range(len(self.processes) + 1)]
        for process, first, end in zip(self.processes, bounds, bounds[1:], strict=False):
            process.begin(texts[first:end], materials[first:end])

    def collect(self) -> list[Verdict]:
        """Return the verdict on each answer."""
        verdicts = (verdict for process in self.processes for verdict in process.verdicts)
        for place, verdict in zip(self._places, verdicts, strict=True):
            self._verdicts[place] = verdict
        return self._verdicts

    def _find_reference(self, row: Mapping[str, Any]) -> str:
        return find_reference(row, self._fields, self._reward.pattern)
