"""The pipeline bubble of a plan beside schedules that are played through here, pass by pass."""

import pytest

from bundle.environment.hardware import build_preset
from bundle.planning import to_json, to_text
from bundle.planning.layout import build_rank_layout
from bundle.recipe import Recipe
from tests.planning import jobs
from tests.planning.jobs import QWEN3, job, read_section

FORWARD, BACKWARD = 1, 2  # how long a pass through a chunk takes
# Stages, chunks of each, micro-batches: interleaving takes a multiple of the stages of them.
CASES = [(stages, 1, count) for stages in (1, 2, 4, 8, 16) for count in (1, 3, stages, 4 * stages + 1)] + [
    (stages, chunks, rounds * stages) for stages in (2, 4, 8) for chunks in (2, 3) for rounds in (1, 2, 4)
]


def staged(stages: int, chunks: int, microbatches: int) -> Recipe:
    parallel = {"pp": stages, "vpp": chunks if chunks > 1 else None}
    return job(
        QWEN3 | {"num_hidden_layers": 2 * stages * chunks},
        parallel=parallel,
        train={"steps": 1, "global_batch_size": microbatches},
    )


def passes(stage: int, stages: int, chunks: int, microbatches: int) -> list[tuple[bool, int, int]]:
    """(whether forward, chunk, micro-batch) as a stage computes them: first forward alone, then in turns."""
    if chunks == 1:
        first = stages - stage - 1
    else:
        first = 2 * (stages - stage - 1) + (chunks - 1) * stages
    rounds = [range(start, min(start + stages, microbatches)) for start in range(0, microbatches, stages)]
    forward = [(True, chunk, of) for group in rounds for chunk in range(chunks) for of in group]
    backward = [(False, chunk, of) for group in rounds for chunk in reversed(range(chunks)) for of in group]
    first = min(first, len(forward))
    turns = [one for pair in zip(forward[first:], backward, strict=False) for one in pair]
    return [*forward[:first], *turns, *backward[len(forward) - first :]]


def idle(stages: int, chunks: int, microbatches: int) -> float:
    """The share of the step that a stage does nothing in."""
    left = [passes(stage, stages, chunks, microbatches) for stage in range(stages)]
    free = [0] * stages
    done: dict[tuple[bool, int, int], int] = {}  # when a pass of a chunk, numbered over all stages, is over
    while any(left):
        for stage, queue in enumerate(left):
            while queue:
                forward, chunk, of = queue[0]
                at = chunk * stages + stage
                if forward:
                    needs = [(True, at - 1, of)] if at else []
                else:
                    last = at == stages * chunks - 1
                    needs = [(True, at, of), *([] if last else [(False, at + 1, of)])]
                if any(one not in done for one in needs):
                    break
                start = max([free[stage], *(done[one] for one in needs)])
                free[stage] = done[forward, at, of] = start + (FORWARD if forward else BACKWARD)
                queue.pop(0)
    return 1 - microbatches * chunks * (FORWARD + BACKWARD) / max(free)


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), CASES)
def test_stages_wait_as_long_as_their_schedule_makes_them(
    stages: int, chunks: int, microbatches: int
) -> None:
    layout = build_rank_layout(staged(stages, chunks, microbatches), stages)
    assert layout.bubble == pytest.approx(idle(stages, chunks, microbatches), abs=1e-12)


def test_it_counts_the_micro_batches_of_a_data_parallel_rank() -> None:
    assert build_rank_layout(staged(2, 1, 8), 8).bubble == pytest.approx(idle(2, 1, 2))


@pytest.mark.parametrize(("chunks", "share"), [(1, "27%"), (2, "16%")])
def test_a_plan_with_stages_says_it(chunks: int, share: str, messages) -> None:
    made = jobs.plan(staged(4, chunks, 16), build_preset("h200"))
    assert to_json(made)["layout"]["bubble"] == pytest.approx(idle(4, chunks, 8))
    shown = read_section(made, "step")
    assert share in shown
    messages(shown)


def test_one_without_stages_has_none_to_say() -> None:
    made = jobs.plan(job(QWEN3, train={"steps": 1, "global_batch_size": 16}), build_preset("h200"))
    assert to_json(made)["layout"]["bubble"] == 0
    assert "bubble" not in to_text(made, "run", "starts")
