"""Trains one model on one set of process groups."""

from bundle.engine.engine import Engine, StepResult
from bundle.engine.losses import Losses, Objective
from bundle.engine.microbatch import MicroBatch
from bundle.engine.scores import Scores

__all__ = ["Engine", "Losses", "MicroBatch", "Objective", "Scores", "StepResult"]
