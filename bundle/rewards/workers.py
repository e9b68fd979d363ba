"""The rewards that processes judge: math and code an answer at a time, python and http all in one call."""

from collections.abc import Mapping, Sequence
from typing import Any

from bundle.recipe.rl import RLReward
from bundle.recipe.rl_rules import split_function
from bundle.rewards.judging import Failure, Verdict
from bundle.rewards.process import RewardProcess
from bundle.rewards.references import MissingReference, find_reference, find_tests

# Seconds in which a sandbox has ended a program whose time is over; then its process is ended.
SANDBOX_GRACE_SECONDS = 20.0


class WorkerJudge:
    """A reward whose processes share out the answers: each has a stretch of them, of equal length."""

    def __init__(self, reward: RLReward, fields: Sequence[str]) -> None:
        """Start the processes of a reward of any kind but exact; `fields` may have the right answer."""
        self._reward, self._fields = reward, fields
        timeout = reward.timeout_seconds
        setting: dict[str, Any] = {"kind": reward.kind, "seconds": timeout}
        if reward.function is not None:
            setting["file"], setting["name"] = split_function(reward.function)
        setting |= {"url": reward.url, "memory_gib": reward.memory_gib}
        if reward.kind == "code":
            timeout += SANDBOX_GRACE_SECONDS
        self.processes = tuple(
            RewardProcess(setting, timeout, one_by_one=reward.kind in ("math", "code"))
            for _ in range(reward.processes)
        )
        self._verdicts: list[Verdict] = []
        self._places: list[int] = []  # of the answers that processes judge

    def begin_judging(self, answers: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
        """Hand the answers to the processes; `collect` has the verdicts when none is asked any more."""
        self._verdicts, self._places = [None] * len(answers), []
        materials: list[Any] = []  # what each answer is judged by: its row, tests, or the right answer
        for place, row in enumerate(rows):
            try:
                materials.append(self._select_judge_input(row))
                self._places.append(place)
            except MissingReference as error:
                self._verdicts[place] = Failure("raised", str(error))
        texts = [answers[place] for place in self._places]
        bounds = [len(texts) * part // len(self.processes) for part in range(len(self.processes) + 1)]
        for process, first, end in zip(self.processes, bounds, bounds[1:], strict=False):
            process.begin_judging(texts[first:end], materials[first:end])

    def assemble_verdicts(self) -> list[Verdict]:
        """Return the verdict on each answer."""
        verdicts = (verdict for process in self.processes for verdict in process.verdicts)
        for place, verdict in zip(self._places, verdicts, strict=True):
            self._verdicts[place] = verdict
        return self._verdicts

    def _select_judge_input(self, row: Mapping[str, Any]) -> Any:
        if self._reward.tests is not None:
            return find_tests(row, self._reward.tests)
        if self._reward.kind == "math":
            return find_reference(row, self._fields, self._reward.pattern)
        return row
