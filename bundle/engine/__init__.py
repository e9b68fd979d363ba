"""Trains one model on one set of process groups."""

from bundle.engine.engine import Engine, StepResult
from bundle.engine.losses import Losses, Objective, Scores
from bundle.engine.microbatch import MicroBatch

__all__ = ["Engine", "Losses", "MicroBatch", "Objective", "Scores", "StepResult"]
