"""What answers are worth: rewards that judge them in processes of their own, within limits of time."""

from bundle.rewards.judging import (
    Failure,
    FailureKind,
    Judge,
    Judgement,
    Verdict,
    check_failed_share,
    combine_verdicts,
    join_judgements,
)
from bundle.rewards.pool import RewardPool
from bundle.rewards.references import find_reference

__all__ = [
    "Failure",
    "FailureKind",
    "Judge",
    "Judgement",
    "RewardPool",
    "Verdict",
    "check_failed_share",
    "combine_verdicts",
    "find_reference",
    "join_judgements",
]
