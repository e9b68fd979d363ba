"""The decision table, row by row, on readings made by hand."""

from dataclasses import replace

import pytest

from bundle.patches.decision_rules import (
    PatchContext,
    build_seam_drift_warning,
    decide_patch,
    decide_trap,
    mark_conflicts,
)
from bundle.patches.entry import (
    NO_CALLER_ASSUMPTION,
    Decision,
    DefectKind,
    Patch,
    PatchAction,
    Presence,
    Replacement,
    Seam,
    Trap,
    detect_in_definitions,
)
from bundle.patches.megatron_core import VERSION_ONLY_READING, Reading

TARGET = "megatron.core.a:f"
PATCH = Patch(
    id="p",
    replacements=(Replacement(TARGET, "a:w"),),
    why="why",
    kind=DefectKind.SILENT,
    upstream="upstream",
    range=">=0.16,<0.18",
    when=frozenset({"mla", "packed"}),
    defect=detect_in_definitions(TARGET)(lambda code: Presence.UNKNOWN),
)
IN, OUT = PatchContext(version="0.17.1"), PatchContext(version="0.18.0")
P, A, U = Presence.PRESENT, Presence.ABSENT, Presence.UNKNOWN
REVIEWED = Reading(P, fingerprints={TARGET: "aa"}, references={TARGET: ("0.17.1",)})
CHANGED = Reading(P, fingerprints={TARGET: "bb"}, references={TARGET: ()})
GONE = Reading(P, nearest_names={TARGET: ("megatron.core.a:g",)})


@pytest.mark.parametrize(
    ("job", "evidence", "reading", "action", "proven", "value"),
    [
        (IN, A, REVIEWED, PatchAction.SKIP, True, ""),
        (OUT, A, CHANGED, PatchAction.SKIP, True, ""),
        (IN, A, GONE, PatchAction.SKIP, True, ""),
        (IN, P, REVIEWED, PatchAction.APPLY, True, ""),
        (OUT, P, REVIEWED, PatchAction.APPLY, True, "0.18.0"),
        (IN, P, CHANGED, PatchAction.DRIFT, True, "--allow-drift p"),
        (OUT, P, CHANGED, PatchAction.DRIFT, True, "tools.patches.review"),
        (IN, P, GONE, PatchAction.DRIFT, True, "megatron.core.a:g"),
        (OUT, P, GONE, PatchAction.DRIFT, True, "megatron.core.a:g"),
        (IN, U, REVIEWED, PatchAction.DRIFT, False, "unfamiliar"),
        (IN, U, GONE, PatchAction.DRIFT, False, "unfamiliar"),
        (OUT, U, REVIEWED, PatchAction.SKIP, False, ">=0.16,<0.18"),
    ],
)
def test_a_row_of_the_table(
    job: PatchContext,
    evidence: Presence,
    reading: Reading,
    action: PatchAction,
    proven: bool,
    value: str,
    messages,
):
    decision = decide_patch(PATCH, replace(reading, presence=evidence), job)
    assert (decision.action, decision.proven) == (action, proven)
    assert value in decision.reason
    messages(decision.reason)
    assert decision.stops == (action is PatchAction.DRIFT)


@pytest.mark.parametrize(
    ("version", "action"),
    [
        ("0.17.2", PatchAction.APPLY),
        ("0.16.0rc0+g1234abc", PatchAction.APPLY),
        ("0.18.3", PatchAction.SKIP),
        ("0.15.9", PatchAction.SKIP),
    ],
)
def test_a_number_alone_decides_but_proves_nothing(version: str, action: PatchAction):
    decision = decide_patch(PATCH, VERSION_ONLY_READING, PatchContext(version=version))
    assert (decision.action, decision.proven, decision.presence) == (action, False, Presence.UNKNOWN)
    assert "--mcore PATH" in decision.reason
    assert decision.targets == (TARGET,) and decision.fingerprints == ()


def test_a_tree_without_a_version_is_decided_by_its_source():
    nameless = PatchContext(version=None)
    assert decide_patch(PATCH, REVIEWED, nameless).action is PatchAction.APPLY
    assert decide_patch(PATCH, Reading(A), nameless).action is PatchAction.SKIP
    assert decide_patch(PATCH, Reading(U), nameless).action is PatchAction.DRIFT


@pytest.mark.parametrize("reading", [REVIEWED, CHANGED, GONE])
def test_what_nobody_vouches_for_is_left_out_by_name(reading: Reading):
    assuming = PATCH._replace(assumes="the caller sums")
    strangers = replace(IN, vouched=frozenset({"q"}))
    decision = decide_patch(assuming, reading, strangers)
    assert (decision.action, decision.stops) == (PatchAction.UNVOUCHED, False)
    assert assuming.assumes in decision.reason
    own = decide_patch(assuming, reading, IN)
    assert decide_patch(assuming, reading, replace(IN, vouched=frozenset({"p"}))) == own
    assert decide_patch(PATCH._replace(assumes=NO_CALLER_ASSUMPTION), reading, strangers).action is own.action
    assert decide_patch(assuming, replace(reading, presence=A), strangers).action is PatchAction.SKIP
    without = replace(strangers, features=frozenset({"mla"}))
    assert decide_patch(assuming, REVIEWED, without).action is PatchAction.SKIP


def test_what_the_job_does_not_need_is_skipped(messages):
    lacking = replace(IN, features=frozenset({"mla"}))
    elsewhere = PATCH._replace(backends=("cpu",))
    old = replace(IN, packages={"torch": "2.6.0+cpu"})
    newer = PATCH._replace(requires=(("torch", ">=2.8"),))
    for patch, job, value in (
        (PATCH, lacking, "packed"),
        (elsewhere, replace(IN, backend="cuda"), "cpu"),
        (newer, old, "2.6.0+cpu"),
    ):
        decision = decide_patch(patch, REVIEWED, job)
        assert decision.action is PatchAction.SKIP and value in decision.reason
        messages(decision.reason)
    assert decide_patch(newer, REVIEWED, replace(IN, packages={"torch": "2.8.0"})).action is PatchAction.APPLY
    unknown = decide_patch(newer, REVIEWED, IN).reason
    assert "torch" in unknown and ">=2.8" in unknown
    messages(unknown)
    for job in (lacking, old):
        assert not decide_patch(newer, REVIEWED, job).stops


def test_a_drift_that_the_job_does_not_meet_is_a_warning():
    lacking = replace(IN, features=frozenset({"mla"}))
    assert decide_patch(PATCH, CHANGED, lacking).action is PatchAction.DRIFT
    assert not decide_patch(PATCH, CHANGED, lacking).stops
    needed = replace(IN, features=frozenset({"mla", "packed", "cp"}))
    assert decide_patch(PATCH, CHANGED, needed).stops
    # not even a warning on another backend
    assert (
        decide_patch(PATCH._replace(backends=("cpu",)), CHANGED, replace(IN, backend="cuda")).action
        is PatchAction.SKIP
    )


def test_an_allowed_drift_is_applied_where_there_is_something_to_wrap(messages):
    allowed = replace(IN, allowed=frozenset({"p"}))
    changed = decide_patch(PATCH, CHANGED, allowed)
    assert changed.action is PatchAction.APPLY and not changed.stops
    assert decide_patch(PATCH, REVIEWED, IN).reason != changed.reason and TARGET in changed.reason
    messages(changed.reason)
    gone = decide_patch(PATCH, GONE, allowed)
    assert gone.action is PatchAction.DRIFT and not gone.stops


def test_an_opt_in_patch_waits_to_be_asked_for(messages):
    patch = PATCH._replace(opt_in=True)
    # not even a warning for who did not
    assert decide_patch(patch, CHANGED, IN).action is PatchAction.SKIP
    waiting = decide_patch(patch, REVIEWED, IN)
    assert waiting.action is PatchAction.SKIP and "--request p" in waiting.reason
    messages(waiting.reason)
    asked = replace(IN, requested=frozenset({"p"}))
    assert decide_patch(patch, REVIEWED, asked).action is PatchAction.APPLY


@pytest.mark.parametrize("reading", [Reading(A), GONE, CHANGED])
def test_a_requested_patch_that_cannot_apply_stops_the_job(reading: Reading):
    assert decide_patch(PATCH, reading, replace(IN, requested=frozenset({"p"}))).stops


def test_an_optional_target_may_be_gone_but_not_all_of_them(messages):
    other = "megatron.core.a:g"
    both = tuple(Replacement(name, "a:w", optional=True) for name in (TARGET, other))
    patch = PATCH._replace(replacements=both)
    one = decide_patch(patch, replace(REVIEWED, nearest_names={other: ()}), IN)
    assert one.action is PatchAction.APPLY and one.targets == (TARGET,)
    none = decide_patch(patch, Reading(P, nearest_names={TARGET: (), other: ()}), IN)
    assert none.action is PatchAction.DRIFT and TARGET in none.reason and other in none.reason
    messages(none.reason)


def test_source_that_cannot_be_read_is_a_drift_that_says_why():
    decision = decide_patch(PATCH, Reading(U, read_error="a.py: SyntaxError"), IN)
    assert decision.action is PatchAction.DRIFT and "a.py: SyntaxError" in decision.reason


def test_two_trees_are_a_conflict():
    decision = decide_patch(PATCH, REVIEWED, replace(IN, conflict="core from a, training from b"))
    assert decision.action is PatchAction.CONFLICT and decision.stops
    assert decide_patch(PATCH, Reading(A), replace(IN, conflict="x")).action is PatchAction.SKIP


ROUTING = "megatron.core.transformer.moe.router:TopKRouter.routing"
HEADS = "megatron.core.transformer.multi_latent_attention:MLASelfAttention.get_query_key_value_tensors"
COMMIT = "d0d5809d4323eb908f89e87958de254465eb57b4"


@pytest.mark.parametrize("target", [ROUTING, HEADS])
@pytest.mark.parametrize("backend", ["ascend", None])
def test_a_target_that_mindspeed_replaces_is_its_own(target: str, backend: str | None):
    patch = PATCH._replace(replacements=(Replacement(target, "a:w"),))
    present = Reading(P, {target: "aa"}, {target: ("0.17.1",)})
    decision = decide_patch(patch, present, replace(IN, backend=backend, mindspeed=(COMMIT,)))
    assert (decision.action, decision.proven) == (PatchAction.OWNED, True)
    assert "core_r0.15.3" in decision.reason and not decision.stops
    unknown = decide_patch(patch, present, replace(IN, mindspeed=("0" * 40,)))
    assert (unknown.action, unknown.proven) == (PatchAction.OWNED, False)
    asked = replace(IN, mindspeed=(COMMIT,), requested=frozenset({"p"}))
    assert decide_patch(patch, present, asked).action is PatchAction.APPLY


def test_mindspeed_owns_nothing_on_other_backends_nor_what_it_only_wraps():
    forward = "megatron.core.models.gpt.gpt_model:GPTModel.forward"
    for target, backend in ((ROUTING, "cuda"), (forward, "ascend")):
        patch = PATCH._replace(replacements=(Replacement(target, "a:w"),))
        present = Reading(P, {target: "aa"}, {target: ("0.17.1",)})
        job = replace(IN, backend=backend, mindspeed=(COMMIT,))
        assert decide_patch(patch, present, job).action is PatchAction.APPLY


def test_beside_an_owner_that_nobody_read_every_patch_for_npus_is_a_drift(messages):
    beside = replace(IN, unread_patcher="MegatronAdaptor 0.18.0")
    for backend in ("ascend", None):
        decision = decide_patch(PATCH, REVIEWED, replace(beside, backend=backend))
        assert decision.action is PatchAction.DRIFT and decision.stops
        assert "MegatronAdaptor 0.18.0" in decision.reason and TARGET in decision.reason
        messages(decision.reason)
    assert (
        decide_patch(PATCH, REVIEWED, replace(beside, allowed=frozenset({"p"}))).action is PatchAction.APPLY
    )
    assert decide_patch(PATCH, REVIEWED, replace(beside, backend="cuda")).action is PatchAction.APPLY
    assert decide_patch(PATCH, Reading(A), beside).action is PatchAction.SKIP


def applied(patch: Patch) -> Decision:
    return decide_patch(patch, REVIEWED, IN)


def test_two_wrappers_share_a_target_but_a_replacement_shares_it_with_none():
    second = PATCH._replace(id="q")
    alone = second._replace(replacements=(Replacement(TARGET, "a:v", exclusive=True),))
    together = mark_conflicts([applied(PATCH), applied(second)], {"p": PATCH, "q": second})
    assert [decision.action for decision in together] == [PatchAction.APPLY, PatchAction.APPLY]
    clash = mark_conflicts([applied(PATCH), applied(alone)], {"p": PATCH, "q": alone})
    assert [decision.action for decision in clash] == [PatchAction.CONFLICT, PatchAction.CONFLICT]
    assert all("p and q" in decision.reason and decision.stops for decision in clash)


TRAP = Trap(
    id="t",
    range="<0.19",
    defect=detect_in_definitions(TARGET)(lambda code: Presence.UNKNOWN),
    when=frozenset({"moe", "tp"}),
    unless=frozenset({"ep"}),
    why="Wrong.",
    kind=DefectKind.SILENT,
    cause="a line",
    instead="Do otherwise.",
)


USES = frozenset({"moe", "tp", "cp"})
NEW = PatchContext(version="0.19.0")


@pytest.mark.parametrize(
    ("job", "reading", "action", "proven", "cause"),
    [
        (IN, Reading(P), PatchAction.TRAP, True, ""),
        (NEW, Reading(P), PatchAction.TRAP, True, ""),
        (PatchContext(version=None), Reading(P), PatchAction.TRAP, True, ""),
        (IN, Reading(A), None, True, ""),
        (NEW, Reading(A), None, True, ""),
        (IN, Reading(U), PatchAction.TRAP, False, "0.17.1"),
        (PatchContext(version=None), Reading(U), PatchAction.TRAP, False, "Without a version"),
        (IN, Reading(U, read_error="a.py: broken"), PatchAction.TRAP, False, "a.py: broken"),
        (NEW, Reading(U), PatchAction.SKIP, False, "0.19.0"),
        (IN, VERSION_ONLY_READING, PatchAction.TRAP, False, "--mcore PATH"),
        (NEW, VERSION_ONLY_READING, PatchAction.SKIP, False, "--mcore PATH"),
        # a number that cannot be placed is no reason to let it pass
        (PatchContext(version="nightly"), VERSION_ONLY_READING, PatchAction.TRAP, False, "nightly"),
    ],
)
def test_a_row_of_the_table_for_a_trap(
    job: PatchContext, reading: Reading, action: PatchAction | None, proven: bool, cause: str, messages
):
    decision = decide_trap(TRAP, reading, replace(job, features=USES))
    if decision is None:
        assert action is None
        return
    assert (decision.action, decision.proven) == (action, proven)
    assert decision.stops == (action is PatchAction.TRAP) == (TRAP.instead in decision.reason)
    assert cause in decision.reason and (decision.reason == f"{TRAP.why} {TRAP.instead}") == proven
    messages(decision.reason)


def test_a_trap_stops_only_a_recipe_that_meets_it():
    for features in ({"moe"}, {"moe", "tp", "ep"}):
        assert decide_trap(TRAP, Reading(P), replace(IN, features=frozenset(features))) is None
    assert decide_trap(TRAP._replace(backends=("cpu",)), Reading(P), replace(IN, backend="cuda")) is None


def test_without_a_recipe_a_trap_is_only_said():
    said = decide_trap(TRAP, Reading(P), IN)
    assert said is not None and said.action is PatchAction.TRAP and not said.stops


SEAM = Seam(id="s", targets=(TARGET,), use="called by the engine", why="Why.", when=frozenset({"mtp"}))


def test_a_changed_seam_is_a_warning_and_a_reviewed_one_is_nothing(messages):
    assert build_seam_drift_warning(SEAM, None, IN) is None
    assert build_seam_drift_warning(SEAM, REVIEWED, IN) is None
    for reading in (CHANGED, GONE):
        decision = build_seam_drift_warning(SEAM, reading, IN)
        assert decision is not None and decision.action is PatchAction.DRIFT and not decision.stops
        assert TARGET in decision.reason and SEAM.use in decision.reason
        messages(decision.reason)
    assert build_seam_drift_warning(SEAM, CHANGED, replace(IN, features=frozenset({"mla"}))) is None
    assert build_seam_drift_warning(SEAM._replace(range="<0.17"), GONE, IN) is None
