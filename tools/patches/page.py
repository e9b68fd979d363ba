"""docs/patches.md, made from the list: `python -m tools.patches.page > docs/patches.md`."""

from collections.abc import Iterable, Sequence

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from bundle.environment import BACKENDS
from bundle.patches import mindspeed
from bundle.patches.catalogue import PATCHES, SEAMS, TRAPS
from bundle.patches.entry import DefectKind, Patch, Presence, Replacement, Trap
from bundle.patches.megatron_core import load_review_table
from tools.markdown import table

_INTRODUCTION = """\
# Patches

`python -m tools.patches.page > docs/patches.md` makes this page from the list of patches, and a test compares
the two.

This page lists every patch, with the releases that need it. A patch is data in `bundle/patches/catalogue` and
a small function in `bundle/replacements`. The function calls upstream's code and does not copy it.
`mcore-bundle patches plan` decides about each patch without importing megatron:

| version number | the source has the defect | the target's code was reviewed | decision |
|---|---|---|---|
| any | no | either way | SKIP: fixed, or not yet introduced |
| any | yes | yes | APPLY; the reason says if the number is wrong |
| any | yes | no, or it is gone | DRIFT, with the most similar names |
| in range | unknown | either way | DRIFT |
| out of range | unknown | either way | SKIP, unproven |
| (no source, a released version) | as reviewed | as reviewed | as above |
| (no source, any other version) | | | by the number, unproven: give `--mcore PATH` |

There are four more decisions:

- CONFLICT: two replacements have one target, or `megatron.core` and `megatron.training` are from different
  trees.
- OWNED: MindSpeed replaces the target.
- TRAP: the recipe meets a defect that no narrow patch can fix. The command ends with 2.
- UNVOUCHED: in a program that is not ours ([enable.md](enable.md)), the patch assumes something of its
  caller, and the user has not vouched for it (`--vouch`).

DRIFT and CONFLICT end with exit code 4 where the job needs the patch; `--allow-drift ID` continues.

In the entry of a patch, "assumes" says what the patch expects of the callers of its target. "Source read"
lists the functions and classes whose source is read to decide whether the defect is present. "Upstream"
lists issues and pull requests, or says how we found the defect.

A review compares the whole code of a target. For some targets it compares only the signature (parameters,
defaults, decorators), because the replacement does not depend on the body. The source also decides about a
trap. If there is no source, or the source is not recognised, the version number decides about the trap. The
output then says so.

No recipe uses the features `megatron-balancing`, `megatron-mtp-loss` and `megatron-tied-head`: our engine
computes these losses and the tied head itself. Their patches and traps are for other programs, in which
megatron computes them. `mcore-bundle patches plan` without a recipe includes them.

Patches are applied when megatron is imported, before other code sees the module. A patch is applied only if
the imported source file is the one that mcore-bundle has examined. Removing a patch restores the original
object. One patch, mla-thd-value-padding, leaves its hooks on modules that were built while it was applied.
`tests/patches` puts a wrapper on every target of every release and removes it.
"""


_SENDING = """\
## Sending one

Run `mcore-bundle patches new ID` in a checkout, after `make lint`. The command writes the first files of a
patch, and prints the steps from these files to a passing test: the evidence, the releases with the defect,
the check, the replacement, this page. Send a patch as one pull request with exactly these files and the lines
that the steps name. The pull request says:

- what a user sees, with the smallest program or recipe that shows it, and in which release
- the upstream issue or commit, or how the defect was found, and the first release without it
- what `patches verify ID` printed before the replacement and after it, on which machine
- what the patch assumes of its caller, if anything: the loss function, the labels, what has been summed

The replacement calls the original, and does not copy its code. If no narrow replacement is possible, the
defect is a `Trap` that says what to do instead. A defect without a measurement is not accepted. If only an
accelerator shows the defect, its check raises `NotProvable` elsewhere. Send what the check printed on the
accelerator.
"""


_NOT_SO = """\
## Reported, and not in the list

- Multi-token prediction with a loss function of two outputs is reported to lack the context-parallel size
  (NVIDIA/Megatron-LM#3959). That is wrong: `prediction_with_two_outputs` in `tests/upstream` has the right
  results in every release.
- dp_reshardable is reported to save lists of different lengths as data common to all ranks
  (radixark/Megatron-LM#66, slime#1221). We could not reproduce it.
"""


_KINDS = {
    DefectKind.SILENT: "silent: wrong numbers, or code of others is executed, without any message",
    DefectKind.ERROR: "error: an error or a hang",
    DefectKind.SLOW: "slow: it costs time or memory; the numbers are right",
}


def markdown() -> str:
    """The text of docs/patches.md."""
    parts = [
        _INTRODUCTION,
        "## Which release needs what\n",
        _matrix(),
        "`yes`: applied where the job uses the features. `-`: not needed. A version: that release only.\n",
        *(_section(patch) for patch in PATCHES),
        "## Known traps\n",
        table(("trap", "releases", "met by", "kind", "what happens, and why", "instead"), map(_trap, TRAPS)),
        _NOT_SO,
        _SENDING,
        "## Seams\n\nPrivate names of megatron-core that the bundle uses without replacing them.\n",
        table(
            ("seam", "releases", "names", "use"),
            ((s.id, s.range or "all", _code(s.targets), f"{s.use}. {s.why}") for s in SEAMS),
        ),
        "## MindSpeed\n\nTargets of our patches that MindSpeed may replace. Its source was read at these"
        " commits: "
        + ", ".join(f"{branch} (`{commit[:8]}`)" for commit, branch in mindspeed.BRANCH_BY_COMMIT.items())
        + ".\n",
        table(
            ("target", "branches"),
            ((f"`{t}`", ", ".join(sorted(b))) for t, b in mindspeed.REPLACING_BRANCHES_BY_TARGET.items()),
        ),
        "A job of ours imports MindSpeed where its recipe says so (`backend_options.mindspeed`), at the head"
        " of the branch for its megatron-core. The job leaves most features of MindSpeed off. MindSpeed"
        " then replaces:\n",
        table(
            ("branch", "megatron-core", "targets of ours"),
            (
                (of.branch, of.megatron_range, _code(sorted(of.replaces)))
                for of in mindspeed.SUPPORTED_TRAINING_BRANCHES
            ),
        ),
        "MegatronAdaptor, with which NPUs run 0.18, was not reviewed. If it is installed, every patch for"
        " NPUs is DRIFT in a job with MindSpeed and in other programs. Our jobs without MindSpeed import"
        " neither, and refuse to start if other code has imported MindSpeed or MegatronAdaptor.\n",
    ]
    return "\n".join(parts)


def _matrix() -> str:
    minors = _minors()
    rows = [(f"[{p.id}](#{p.id})", *(_cell(p, group) for group in minors.values())) for p in PATCHES]
    rows += [(trap.id, *(_cell(trap, group) for group in minors.values())) for trap in TRAPS]
    return table(("", *minors), rows)


def _minors() -> dict[str, list[str]]:
    """The reviewed references of each minor, oldest first."""
    minors: dict[str, list[str]] = {}
    for reference in load_review_table().references:
        minors.setdefault(".".join(reference.split(".")[:2]), []).append(reference)
    return minors


def _cell(entry: Patch | Trap, references: Sequence[str]) -> str:
    having = [r for r in references if load_review_table().find_presence(entry.id, r) is Presence.PRESENT]
    if not having:
        return "-"
    if len(having) < len(references):
        return ", ".join(having)
    return "trap" if isinstance(entry, Trap) else "yes"


def _section(patch: Patch) -> str:
    facts = [
        ("releases", f"`{patch.range}`" if patch.range else "all"),
        ("fixed in", fixed_in(patch) or "not yet"),
        ("kind", _KINDS[patch.kind]),
        ("features", ", ".join(sorted(patch.when)) or "any job"),
        ("assumes", patch.assumes),
        ("backends", ", ".join(patch.backends) if patch.backends != BACKENDS else "all"),
        ("upstream", patch.upstream),
        ("source read", _code(patch.evidence_targets)),
        ("replaced", "; ".join(map(_replacement, patch.replacements))),
        ("proven by", f"`mcore-bundle patches verify {patch.id}`"),
    ]
    if patch.opt_in:
        facts.insert(0, ("opt-in", f"`--request {patch.id}`"))
    if patch.requires:
        facts.insert(1, ("only with", ", ".join(f"{name} {range_}" for name, range_ in patch.requires)))
    lines = [f"- {name}: {value}" for name, value in facts]
    return "\n".join([f"### {patch.id}\n", patch.why, "", *lines, ""])


def fixed_in(patch: Patch) -> str | None:
    """The first release without the defect, where its range ends; None where it is still there."""
    ends = [Version(said.version) for said in SpecifierSet(patch.range) if said.operator == "<"]
    return f"{ends[0].major}.{ends[0].minor}.{ends[0].micro}" if ends else None


def _replacement(replacement: Replacement) -> str:
    reviewed = " (only the signature was reviewed)" if replacement.by_signature else ""
    return f"`{replacement.target}` by `{replacement.wrapper}`{reviewed}"


def _trap(trap: Trap) -> tuple[str, ...]:
    met = " and ".join(sorted(trap.when))
    if trap.unless:
        met += f", without {' or '.join(sorted(trap.unless))}"
    shown = f" Not shown by a test: {trap.unshown}." if trap.unshown else ""
    what = f"{trap.why} Cause: {trap.cause}.{shown}"
    return trap.id, trap.range or "all", met, trap.kind, what, trap.instead


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    print(markdown(), end="")
