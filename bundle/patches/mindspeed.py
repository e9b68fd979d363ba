"""Which targets of ours MindSpeed replaces, by its commit: it calls every version of itself 0.12.1.

What it wraps (its own rule: a function whose name ends in wrapper or decorator) still calls upstream's code,
and so can be wrapped once more. Each replacement is behind a feature of MindSpeed's: in jobs of others these
are targets that it *may* own. In ours it is told what to do (`backends.ascend.mindspeed`), and what it then
replaces was looked up in a process of each branch: functions that megatron has compiled too, behind which its
torch.compile hides them.
"""

import json
from pathlib import Path
from typing import NamedTuple

from bundle.environment import packages

_READ = json.loads(Path(__file__).with_name("mindspeed.json").read_text("utf-8"))
BRANCHES: dict[str, str] = _READ["branches"]  # commit, the head -> branch
# target (or its class) -> the branches that replace it
REPLACED: dict[str, frozenset[str]] = {
    target: frozenset(branches.split()) for target, branches in _READ["replaces"].items()
}

_UNSEEN = "and whether its own has the defect was not looked at"


class Adapted(NamedTuple):
    """A branch that our jobs train through (`backend_options.mindspeed`)."""

    branch: str
    commit: str
    megatron: str  # PEP 440 on the base version of megatron-core
    imports: str  # a module that it imports on every machine, and that may not be there; "": none
    replaces: frozenset[str]  # targets of ours, in our jobs


_COMMITS = {branch: commit for commit, branch in BRANCHES.items()}
ADAPTED = tuple(
    Adapted(name, _COMMITS[name], of["megatron-core"], of["imports"], frozenset(of["replaces"]))
    for name, of in _READ["ours"].items()
)


def known(commit: str | None) -> bool:
    """Whether this commit of MindSpeed was read."""
    return commit in BRANCHES


def made_for(version: str) -> Adapted | None:
    """The branch for a megatron-core; None where our jobs have none."""
    return next((of for of in ADAPTED if packages.within(version, of.megatron)), None)


def owned(target: str, commit: str | None) -> str | None:
    """Why the target may be MindSpeed's at this commit; None where it is not.

    A commit that was not read is taken for any of those that were.
    """
    branches = REPLACED.get(target) or REPLACED.get(target.rpartition(".")[0]) or frozenset()
    branch = BRANCHES.get(commit or "")
    if branch is None and branches:
        among = ", ".join(sorted(branches))
        which = (commit or "")[:12] or "of an unknown commit"
        return f"MindSpeed {which} was not read; {among} replace {target}, {_UNSEEN}"
    return f"MindSpeed {branch} replaces {target}, {_UNSEEN}" if branch in branches else None


def owned_in_our_jobs(target: str, commit: str | None) -> str | None:
    """Why the target is MindSpeed's in a job of ours; None where it is not, or jobs refuse this commit."""
    branch = next((of for of in ADAPTED if of.commit == commit), None)
    if branch is None or target not in branch.replaces:
        return None
    return f"MindSpeed {branch.branch} replaces {target} (backend_options.mindspeed), {_UNSEEN}"
