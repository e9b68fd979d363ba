"""The loop of task rl: sample answers, judge them, learn from them, evaluate; until the last update."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bundle.rl.trainer import PolicyTrainer


def train(trainer: "PolicyTrainer") -> None:
    """Train to the last update.

    Raises Preempted, after a checkpoint, when a signal stops the run. Raises JobFailed for a gradient or a
    loss that is not finite (`train.on_nan: stop`), for rewards that fail too often (`rl.max_failed`), and for
    too many steps without anything to learn (`rl.max_flat_steps`).
    """
    session, recipe, rl = trainer.session, trainer.session.recipe, trainer.settings
    if session.progress.step == 0 and not rl.warm_start_steps:
        trainer.evaluate_and_write_metrics()
    while session.progress.step < rl.warm_start_steps:
        warm_start_result = trainer.make_sft_warm_start_update()
        if session.is_due(recipe.train.log_interval):
            session.report_unreported_updates(warm_start_result)
        if session.progress.step == rl.warm_start_steps:
            trainer.evaluate_and_write_metrics()
            session.stop_request.begin_exchange()  # a signal may have come in the meantime
        is_save_due = session.is_due(recipe.checkpoint.interval) or trainer.is_at_best_step
        session.save_if_due_or_preempted(is_last=session.has_finished_last_step, is_save_due=is_save_due)

    while not session.has_finished_last_step:
        before = session.progress.step
        batch = trainer.sample_answers()
        experience, advantages = trainer.build_experience(batch)
        result = trainer.learn(experience, advantages)
        trainer.report(batch, advantages, result, before)
        if session.has_finished_last_step or session.is_due(trainer.evaluation_interval, before):
            trainer.evaluate_and_write_metrics()
        session.export_if_due(before)
        has_updated = session.progress.step > before  # a flat step leaves the best weights what they were
        is_save_due = session.is_due(recipe.checkpoint.interval, before) or (
            has_updated and trainer.is_at_best_step
        )
        session.stop_request.begin_exchange()  # a signal may have come since the last update
        session.save_if_due_or_preempted(is_last=session.has_finished_last_step, is_save_due=is_save_due)
