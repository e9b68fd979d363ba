"""A run of task rl on one rank: samples and judges answers, learns from them, syncs the rollout engine."""

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from bundle.architectures.tensors import Tensors
from bundle.backends import Runtime
from bundle.data.questions import Question, Questions, read_rl_prompts
from bundle.data.samples import draw_permutation
from bundle.distributed.watchdog import Watchdog
from bundle.distributed.world import find_disagreements, run_and_all_gather_results, run_on_rank_0
from bundle.engine import MicroBatch, Scores, StepResult
from bundle.errors import EnvironmentUnfit, JobFailed
from bundle.launch.job import Job
from bundle.models.streaming import Receiver, TensorStream
from bundle.rewards import RewardPool, check_failed_share
from bundle.rl import loop, rollout_files
from bundle.rl.advantages import (
    Advantages,
    compute_advantages,
    compute_kl_penalties,
    compute_overlong_reward_terms,
)
from bundle.rl.answers import AnswerBatch, AnswerSampler, join_batches
from bundle.rl.corrections import Correction
from bundle.rl.evaluation import evaluate
from bundle.rl.experience import BatchBuilder, Experience, Floats, find_token_indices_and_lengths
from bundle.rl.objectives import PolicyLossSettings, PolicyObjective
from bundle.rollouts import Rollout, Sampling, SyncOnlyRollout
from bundle.rollouts.sglang.building import build_rollout
from bundle.rollouts.sglang.memory import TrainerMemory
from bundle.rollouts.transformers import TransformersRollout
from bundle.runs.session_builder import SessionBuilder, train_in_locked_directory

_log = logging.getLogger(__name__)

T = TypeVar("T")
_MAX_WEIGHT_RESENDS = 2  # of weights that all servers have lost, for the same answers
_NO_IMAGE_GRIDS: NDArray[np.int64] = np.zeros((0, 3), np.int64)


class UpdateSizes(NamedTuple):
    """What an update learned from (`runs.session.SequenceAndImageSizes`)."""

    lengths: NDArray[np.int64]
    grids: NDArray[np.int64] = _NO_IMAGE_GRIDS


class PolicyTrainer:
    """A run of task rl on this rank; `loop.train` calls its methods in order.

    `session` holds the engine and what runs of all tasks need. All ranks call every method, in the same
    order.
    """

    def __init__(self, builder: SessionBuilder, exit_stack: ExitStack) -> None:
        """Read the questions, build the model, start the rewards and the rollout engine.

        `exit_stack` closes the last two.
        """
        recipe, watchdog = builder.recipe, builder.watchdog
        assert recipe.rl is not None, "the rules of a recipe require it for task rl"
        self.settings = recipe.rl
        with watchdog.extend_patience("reading the questions"):
            self.questions = _prepare_and_compare_questions(builder)
        objective = PolicyObjective(_build_loss(self.settings), builder.groups)
        has_reference = self.settings.loss.kl > 0 and recipe.model.lora is None
        self.session = builder.build(
            len(self.questions.training),
            self.questions.identity,
            objective=objective,
            end_tokens=self.questions.stop,
            keep_reference=(lambda engine: engine.keep_reference()) if has_reference else None,
        )
        self._batch_builder = BatchBuilder(
            recipe, builder.groups, builder.device, self.settings.loss_temperature
        )
        self._state = self.session.task_state
        for name in ("rollouts", "skipped_steps", "flat_steps"):
            self._state.setdefault(name, 0)
        self.session.checkpoints.best_step = self._state.get("best_step")
        # When the first step of this process was reported, and the updates until then.
        self._first_report: tuple[float, int] | None = None
        self._shared_memory = TrainerMemory.from_job(builder.job, builder.device)
        is_replay = self.settings.rollout.path is not None
        self._sampler = None if is_replay else self._start_sampler(builder, exit_stack)

    def _start_sampler(self, builder: SessionBuilder, exit_stack: ExitStack) -> AnswerSampler:
        """Start the rewards and the rollout engine; a replay needs neither."""
        recipe, models = builder.recipe, self.session.engine.models
        rewards = _start_on_ranks(
            lambda: exit_stack.enter_context(RewardPool(self.settings.rewards, recipe.data.fields.response))
        )
        self._rollout: Rollout = _start_on_ranks(lambda: self._build_rollout(builder))
        exit_stack.callback(self._rollout.close)
        self._stream = TensorStream.from_chunks(
            models, builder.groups, Tensors(recipe.architecture, builder.groups.tp.size)
        )
        # Servers are asked by one rank, and get the weights from it.
        asking_ranks = 1 if self.settings.rollout.engine == "sglang" else dist.get_world_size()
        self._receiver: Receiver = 0 if asking_ranks == 1 else "all"
        return AnswerSampler(
            self._rollout,
            rewards,
            self.questions.tokenizer,
            self.questions.stop,
            asking_ranks=asking_ranks,
        )

    def _build_rollout(self, builder: SessionBuilder) -> Rollout:
        """Return the rollout engine of this rank."""
        recipe, directory = builder.recipe, builder.directory
        if self.settings.rollout.engine == "sglang":
            if dist.get_rank() > 0:
                return SyncOnlyRollout()
            return build_rollout(recipe, directory.logs / "rollout", directory.root, self._shared_memory)
        return TransformersRollout(
            recipe.model.config,
            recipe.architecture,
            dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[recipe.model.dtype],
            device=builder.device,
        )

    def train(self) -> None:
        """Train to the last step and write the result; raise what `loop.train` raises."""
        self.session.train_and_finalize(lambda: loop.train(self), self._describe_result)

    # What the loop calls, in its order.

    def make_sft_warm_start_update(self) -> StepResult:
        """Make one update of SFT on the answers in the rows (rl.warm_start_steps); return its result."""
        session, size = self.session, self.session.recipe.train.global_batch_size
        questions = self.questions.draw(session.progress.consumed_samples, size)
        experience = Experience.from_answers(
            [question.ids for question in questions], [question.response for question in questions]
        )
        plan = self._batch_builder.plan(experience.lengths, np.arange(size))
        micro_batches = self._batch_builder.build(experience, plan)

        def learn() -> UpdateSizes:
            session.engine.forward_backward(micro_batches, _compute_cross_entropy)
            return UpdateSizes(experience.lengths)

        return session.make_update(learn, size)

    def sample_answers(self) -> AnswerBatch:
        """Return judged answers to the next questions.

        Groups whose rewards are all equal are replaced by groups of further questions, at most
        rl.dynamic_sampling times. Raises JobFailed where rewards fail on a larger share of the answers than
        rl.max_failed.
        """
        rl, session = self.settings, self.session
        batches: list[AnswerBatch] = []
        missing = rl.prompts_per_step
        for attempt in range(1 + rl.dynamic_sampling):
            first = session.progress.consumed_samples
            questions = self.questions.draw(first, missing)
            session.progress.consumed_samples += missing
            batch = self._sample_or_read_rollout_path(questions, first, attempt)
            judgement = batch.judgement
            check_failed_share(judgement.failed, len(batch.answers), rl.max_failed, judgement.first_reason)
            if attempt < rl.dynamic_sampling:
                flat = set(self._compute_advantages(batch).flat_groups)
                batch = batch.select([group for group in range(len(questions)) if group not in flat])
                missing = len(flat)
            batches.append(batch)
            if attempt == rl.dynamic_sampling or not missing:
                break
        if self._sampler is not None:
            self._rollout.release_cache_until_sync()
        return join_batches(batches)

    def build_experience(self, batch: AnswerBatch) -> tuple[Experience, Advantages]:
        """Return the sequences with the values that the loss reads, and the advantages of the answers."""
        rl = self.settings
        experience = Experience.from_answers(
            batch.prompt_per_answer, [answer.ids for answer in batch.answers]
        )
        rollout_log_probs: list[Floats] = [answer.log_probs for answer in batch.answers]
        values: dict[str, Sequence[NDArray[Any]]] = {"old_log_probs": rollout_log_probs}
        if rl.old_log_probs == "trainer":
            scored = self._score(experience, self._compute_log_probs)
            values |= {"old_log_probs": scored, "rollout_log_probs": rollout_log_probs}
        penalties = None
        if rl.loss.kl:
            reference = self._score(experience, self.session.engine.compute_reference_log_probs)
            if rl.loss.kl_kind == "k1":
                penalties = compute_kl_penalties(values["old_log_probs"], reference, rl.loss.kl)
            else:
                values["reference_log_probs"] = reference
        advantages = self._compute_advantages(batch, penalties)
        return experience.with_values(**values, advantages=advantages.tokens), advantages

    def learn(self, experience: Experience, advantages: Advantages) -> StepResult | None:
        """Make the updates of a step; return the result of the last one, None where no answer is learned."""
        rl, session = self.settings, self.session
        train = session.recipe.train
        learned = np.flatnonzero(advantages.is_learned)
        order = draw_permutation(len(learned), f"updates {session.recipe.seed} {self._state['rollouts']}")
        updates = min(rl.answers_per_step // train.global_batch_size, len(learned))
        parts = np.array_split(learned[order], updates) if updates else []
        divisor = rl.divisor_per_answer and rl.divisor_per_answer * train.global_batch_size
        prepared = [
            (
                UpdateSizes(experience.lengths[part]),
                self._batch_builder.build(
                    experience,
                    self._batch_builder.plan(experience.lengths, part),
                    list(experience.values),
                ),
            )
            for part in parts
        ]
        result = None
        for sizes, micro_batches in prepared * rl.num_iterations:
            if session.has_finished_last_step:
                break
            result = session.make_update(
                functools.partial(self._compute_gradients, sizes, micro_batches, divisor), 0
            )
        self._state["rollouts"] += 1
        self._count_and_limit_flat_steps(is_flat=result is None)
        return result

    def report(
        self, batch: AnswerBatch, advantages: Advantages, result: StepResult | None, previous_step: int
    ) -> None:
        """Write the metrics of a step where train.log_interval says so; say where nothing was learned.

        `result` is that of the last update, `previous_step` counts the updates before the step.
        """
        session, groups = self.session, len(batch.questions)
        values = batch.measure() | {
            "groups/flat": len(advantages.flat_groups) / groups,
            "groups/small": len(advantages.small_groups) / groups,
            "groups/skipped_steps": self._state["skipped_steps"],
        }
        values |= self._estimate_seconds_left()
        if result is None:  # a line with the step of a checkpoint would stay when the run goes on from there
            if dist.get_rank() == 0:
                _log.info(
                    "no update: all answers of each group have the same reward: reward %.4g, step %d",
                    values["reward/mean"],
                    session.progress.step,
                )
        elif session.has_finished_last_step or session.is_due(
            session.recipe.train.log_interval, previous_step
        ):
            session.report_unreported_updates(result, values)

    def _estimate_seconds_left(self) -> dict[str, float]:
        """Return the metric of the time left, with sampling and evaluations; nothing at the first report."""
        progress, now = self.session.progress, time.monotonic()
        if self._first_report is None:
            self._first_report = now, progress.step
        started, first_step = self._first_report
        updates = progress.step - first_step
        if not updates:
            return {}
        seconds = (now - started) / updates
        return {"train/seconds_left": seconds * (self.session.recipe.train.steps - progress.step)}

    @property
    def evaluation_interval(self) -> int:
        """The number of updates between evaluations; 0: evaluate only at the end."""
        return self.settings.evaluation.interval if self.settings.evaluation else 0

    def evaluate_and_write_metrics(self) -> None:
        """Evaluate on the held-out questions, if any, and write the metrics; a replay does nothing."""
        evaluation, settings = self.questions.evaluation, self.settings.evaluation
        if evaluation is None or settings is None or self._sampler is None:
            return
        sampling = self._build_sampling(self.session.progress.step, is_greedy=settings.samples == 1)
        sampler = self._sampler
        with self.session.watchdog.extend_patience("evaluating"):
            metrics = self._call_with_synced_weights(
                lambda: evaluate(
                    sampler, evaluation.questions, sampling, settings.samples, self.settings.rewards
                )
            )
        step, accuracy = self.session.progress.step, metrics["evaluation/accuracy"]
        self._state["evaluation"] = metrics
        # There is no checkpoint of step 0.
        keeps_best = step > 0 and self.session.recipe.checkpoint.keep_best is not None
        if keeps_best and accuracy > self._state.get("best_accuracy", -1.0):
            self._state |= {"best_step": step, "best_accuracy": accuracy}
            self.session.checkpoints.best_step = step
        self.session.metrics.write(step, metrics)

    @property
    def is_at_best_step(self) -> bool:
        """True if the best evaluation so far is that of the current weights (checkpoint.keep_best)."""
        return self._state.get("best_step") == self.session.progress.step

    def _compute_gradients(
        self, sizes: UpdateSizes, micro_batches: Sequence[MicroBatch], divisor: float | None
    ) -> UpdateSizes:
        self.session.engine.forward_backward(
            micro_batches, divisor=divisor, mean=self.session.recipe.loss_mean
        )
        return sizes

    def _sample_or_read_rollout_path(
        self, questions: Sequence[Question], first: int, attempt: int
    ) -> AnswerBatch:
        """Return judged answers to these questions: sampled ones, or those of a file (rl.rollout.path)."""
        number, session = self._state["rollouts"], self.session
        path = rollout_files.find_path(session.directory.rollouts, number, attempt)
        if self.settings.rollout.path is not None:
            replayed = rollout_files.find_path(Path(self.settings.rollout.path), number, attempt)
            size = self.settings.num_generations
            return run_on_rank_0(lambda: rollout_files.read_batch(replayed, questions, size))
        sampler = self._sampler
        assert sampler is not None, "only a replay has none"
        with session.watchdog.extend_patience("sampling answers"):
            batch = self._call_with_synced_weights(
                lambda: sampler.sample_and_judge(
                    questions, first, self.settings.num_generations, self._build_sampling(number)
                )
            )
        run_on_rank_0(lambda: rollout_files.write_batch(path, batch, self.questions.tokenizer))
        return batch

    def _call_with_synced_weights(self, ask: Callable[[], T]) -> T:
        """Return what `ask` returns, with the current weights in the rollout engine.

        They are sent again where all servers have lost them: memory that was shared is in no file.
        """
        for _ in range(_MAX_WEIGHT_RESENDS):
            try:
                self._sync()
                return ask()
            except JobFailed as error:
                if not run_on_rank_0(lambda: self._rollout.can_recover_by_resync):
                    raise
                if dist.get_rank() == 0:
                    _log.warning("sending the weights again: %s", error)
                self._rollout.release_cache_until_sync()  # every rank forgets the version
        self._sync()
        return ask()

    def _sync(self) -> None:
        """Copy the current weights to the rollout engine, unless it has them."""
        engine, step = self.session.engine, self.session.progress.step
        if self._rollout.version == step:
            return
        engine.gather_weights()
        if self._shared_memory is not None:
            self._shared_memory.release_cache()
        with engine.runtime.megatron_calls():
            tensors = self._stream.publish(self.session.recipe.model.dtype, self._receiver)
            run_and_all_gather_results(lambda: self._rollout.sync(step, tensors))

    def _build_sampling(self, step: int, *, is_greedy: bool = False) -> Sampling:
        rollout = self.settings.rollout
        return Sampling(
            rollout.temperature,
            rollout.max_completion_length,
            self.questions.stop,
            self.session.recipe.seed,
            step,
            greedy=is_greedy,
        )

    def _compute_advantages(
        self, batch: AnswerBatch, penalties: Sequence[NDArray[np.float64]] | None = None
    ) -> Advantages:
        rl, rewards = self.settings, np.array(batch.judgement.rewards)
        if rl.overlong_buffer:
            longest = rl.rollout.max_completion_length
            rewards = rewards + compute_overlong_reward_terms(batch.lengths, longest, rl.overlong_buffer)
        return compute_advantages(
            rl.advantage,
            rewards,
            batch.groups,
            batch.lengths,
            penalties=penalties,
            discount=rl.discount,
            is_truncated=batch.is_truncated,
            mask_truncated=rl.mask_truncated_completions,
        )

    def _compute_log_probs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        return [scores.log_probs for scores in self.session.engine.compute_log_probs(micro_batches)]

    def _score(
        self, experience: Experience, compute: Callable[[Sequence[MicroBatch]], list[Tensor]]
    ) -> list[Floats]:
        """Return the log-probabilities of each answer [answer tokens] by `compute`, the same on all ranks."""
        groups, device = self.session.engine.groups, self.session.engine.device
        plan = self._batch_builder.plan(experience.lengths, np.arange(len(experience.lengths)))
        values = torch.zeros(len(experience.ids) + 1, device=device)
        scored = compute(self._batch_builder.build(experience, plan))
        for (places, _), log_probs in zip(
            find_token_indices_and_lengths(experience, plan), scored, strict=True
        ):
            values[torch.from_numpy(places).to(device)] = log_probs.flatten()
        values[-1] = 0
        dist.all_reduce(values, group=groups.dp.group)
        return experience.extract_answer_values(values[:-1].cpu().numpy())

    def _count_and_limit_flat_steps(self, *, is_flat: bool) -> None:
        """Count a step; raise JobFailed after rl.max_flat_steps steps in a row without an update."""
        self._state["skipped_steps"] += is_flat
        self._state["flat_steps"] = self._state["flat_steps"] + 1 if is_flat else 0
        if self._state["flat_steps"] >= self.settings.max_flat_steps:
            raise JobFailed(
                f"rl.max_flat_steps: {self._state['flat_steps']} steps in a row made no update, because no"
                " group has different rewards or its answers are left out. Look at the answers in"
                f" {self.session.directory.rollouts}; raise rl.num_generations or rl.rollout.temperature,"
                " or use easier questions."
            )

    def _describe_result(self) -> Mapping[str, Any]:
        losses = self.session.progress.losses
        evaluation = self._state.get("evaluation")
        _log.info(
            "finished: %d steps of questions, %s", self._state["rollouts"], evaluation or "not evaluated"
        )
        return {
            "ended": "the last step",
            "loss": losses.main if losses else None,
            "mtp_losses": list(losses.mtp) if losses else [],
            "rollouts": self._state["rollouts"],
            "skipped_steps": self._state["skipped_steps"],
            "evaluation": evaluation,
            "best_step": self._state.get("best_step"),
        }


def run(job: Job, runtime: Runtime, device: torch.device, watchdog: Watchdog) -> None:
    """Train a job of task rl to its last step; raise what `PolicyTrainer.train` raises."""

    def train(builder: SessionBuilder) -> None:
        with ExitStack() as exit_stack:
            PolicyTrainer(builder, exit_stack).train()

    train_in_locked_directory(job, runtime, device, watchdog, train)


def _prepare_and_compare_questions(builder: SessionBuilder) -> Questions:
    """Return the questions, the same on every rank; log what was left out.

    Raise EnvironmentUnfit where ranks read different ones, and on all ranks what one of them raises.
    """
    prepared: list[Questions] = []

    def prepare() -> dict[str, str]:
        prepared.append(read_rl_prompts(builder.recipe))
        return dict(prepared[0].identity)

    if differences := find_disagreements(run_and_all_gather_results(prepare)):
        raise EnvironmentUnfit(
            "data.path: the ranks read different questions. Give every node the same files.", differences
        )
    for line in prepared[0].training.left_out:
        _log.warning(line)
    return prepared[0]


def _start_on_ranks(start: Callable[[], T]) -> T:
    """Return the result of `start` on this rank. Raise on all ranks what one of them raises."""
    started: list[T] = []
    run_and_all_gather_results(lambda: started.append(start()))
    return started[0]


def _build_loss(rl: Any) -> PolicyLossSettings:
    loss, correction = rl.loss, rl.loss.correction
    return PolicyLossSettings(
        kind=loss.kind,
        clip=loss.clip,
        dual_clip=loss.dual_clip,
        entropy=loss.entropy,
        kl=0.0 if loss.kl_kind == "k1" else loss.kl,
        kl_kind="k2" if loss.kl_kind == "k1" else loss.kl_kind,
        correction=None if correction is None else Correction(**correction.model_dump()),
    )


def _compute_cross_entropy(_micro_batch: MicroBatch, scores: Scores) -> Tensor:
    return -scores.log_probs
