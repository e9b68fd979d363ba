"""The targets of our patches that MindSpeed replaces, by its commit: it calls every version of itself 0.12.1.

A function that MindSpeed wraps still calls upstream's code, and so can be wrapped once more. Its own rule is:
a wrapper's name ends in wrapper or decorator. Each replacement is behind a feature of MindSpeed's, so in jobs
of others MindSpeed *may* own these targets. In our jobs `backends.ascend.mindspeed` sets its features. Their
replacements were looked up in a process of each branch. They include functions that megatron has compiled,
which its torch.compile hides.
"""

import json
from pathlib import Path
from typing import NamedTuple

from bundle.environment import packages

_REVIEWED_BRANCH_DATA = json.loads(Path(__file__).with_name("mindspeed.json").read_text("utf-8"))
BRANCH_BY_COMMIT: dict[str, str] = _REVIEWED_BRANCH_DATA["branches"]  # commit, the head -> branch
# target (or its class) -> the branches that replace it
REPLACING_BRANCHES_BY_TARGET: dict[str, frozenset[str]] = {
    target: frozenset(branches.split()) for target, branches in _REVIEWED_BRANCH_DATA["replaces"].items()
}

_UNKNOWN_DEFECT_NOTE = "Whether the replacement has this patch's defect is unknown"


class MindSpeedBranch(NamedTuple):
    """A branch that our jobs train through (`backend_options.mindspeed`)."""

    branch: str
    commit: str
    megatron_range: str  # PEP 440 on the base version of megatron-core
    imports: str  # a module that it imports on every machine, and that may not be there; "": none
    replaces: frozenset[str]  # targets of ours, in our jobs


_COMMIT_BY_BRANCH = {branch: commit for commit, branch in BRANCH_BY_COMMIT.items()}
SUPPORTED_TRAINING_BRANCHES = tuple(
    MindSpeedBranch(
        name,
        _COMMIT_BY_BRANCH[name],
        details["megatron-core"],
        details["imports"],
        frozenset(details["replaces"]),
    )
    for name, details in _REVIEWED_BRANCH_DATA["ours"].items()
)


def is_reviewed_commit(commit: str | None) -> bool:
    """Return whether this commit of MindSpeed was read."""
    return commit in BRANCH_BY_COMMIT


def find_branch_by_megatron_version(version: str) -> MindSpeedBranch | None:
    """Return the branch for a megatron-core; None where our jobs have none."""
    return next(
        (
            candidate
            for candidate in SUPPORTED_TRAINING_BRANCHES
            if packages.is_base_version_within(version, candidate.megatron_range)
        ),
        None,
    )


def explain_possible_replacement(target: str, commit: str | None) -> str | None:
    """Return why the target may be MindSpeed's at this commit; None where it is not.

    A commit that was not read counts as any of those that were.
    """
    branches = (
        REPLACING_BRANCHES_BY_TARGET.get(target)
        or REPLACING_BRANCHES_BY_TARGET.get(target.rpartition(".")[0])
        or frozenset()
    )
    branch = BRANCH_BY_COMMIT.get(commit or "")
    if branch is None and branches:
        branch_names = ", ".join(sorted(branches))
        shown_commit = (commit or "")[:12] or "of an unknown commit"
        return (
            f"MindSpeed {shown_commit} is not a version that mcore-bundle has reviewed. It may replace"
            f" {target}, because these branches do: {branch_names}. {_UNKNOWN_DEFECT_NOTE}"
        )
    return f"MindSpeed {branch} replaces {target}. {_UNKNOWN_DEFECT_NOTE}" if branch in branches else None


def explain_job_replacement(target: str, commit: str | None) -> str | None:
    """Return why the target is MindSpeed's in a job of ours; None where it is not.

    Returns None also for a commit that our jobs refuse.
    """
    branch = next(
        (candidate for candidate in SUPPORTED_TRAINING_BRANCHES if candidate.commit == commit), None
    )
    if branch is None or target not in branch.replaces:
        return None
    return f"MindSpeed {branch.branch} replaces {target} (backend_options.mindspeed). {_UNKNOWN_DEFECT_NOTE}"
