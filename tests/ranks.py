"""What the modules begin and end with that a tests.world.World runs as ranks: patches, a runtime, a world.

Ranks of a launch are others: tests.launch.launched starts them through an agent, which World has none of.
"""

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from bundle.environment import packages
from bundle.patches import PatchAction, megatron_core, plan
from bundle.patches.plan import PatchPlan
from bundle.verification import build_needed_patch_plan, decide_patches
from bundle.worker import prepare_runtime
from tests import world

if TYPE_CHECKING:
    from bundle.backends import Runtime
    from bundle.recipe import Recipe


def start_rank(patches: PatchPlan | None = None, recipe: "Recipe | None" = None) -> tuple["Runtime", int]:
    """Return the runtime of the world's backend and this process's rank, after all ranks have met.

    `patches` are in force from here on; without them, all that the backend has for this megatron-core.
    """
    torch.set_num_threads(1)
    patches = patches or build_needed_patch_plan(decide_patches(world.backend()))
    runtime = prepare_runtime(patches, world.backend(), recipe)
    return runtime, world.join()


def try_cases(cases: Mapping[str, Callable[[int], None]], rank: int) -> dict[str, str]:
    """Return the end of each case's traceback, or "": the others go on. All ranks draw the same numbers."""
    wrong = {}
    for name, case in cases.items():
        torch.manual_seed(11)
        try:
            case(rank)
            wrong[name] = ""
        except Exception:  # noqa: BLE001
            wrong[name] = traceback.format_exc()[-2000:]
    return wrong


def finish_rank(found: Any, rank: int = 0) -> None:
    """Print what was found as JSON, on rank 0 alone where `rank` is given; leave when all ranks are done."""
    if rank == 0:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def plan_patches(cases: Sequence[Any]) -> PatchPlan:
    """What any of the cases needs: one process trains them all. Their sum may look like a trap; none is."""
    here, known = packages.detect(), megatron_core.load_review_table()
    features = frozenset().union(*(case.recipe().features for case in cases))
    found = plan.survey_patches(
        megatron_core.find_installed_or_default_core(here, known),
        known,
        here,
        backend=world.backend(),
        features=features,
    )
    decisions = tuple(d for d in found.decisions if d.action is not PatchAction.TRAP)
    return plan.build_patch_plan(found._replace(decisions=decisions))
