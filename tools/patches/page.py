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

Made from the patch list by `python -m tools.patches.page > docs/patches.md`; a test compares.

This page lists every patch, with the releases that need it. A patch is data in `bundle/patches/catalogue` and
a small function in `bundle/replacements`. The function calls upstream's own code and copies nothing of it.
`mcore-bundle patches plan` decides about each patch without importing megatron:

| the number says | the source has the defect | the target's code was reviewed | decision |
|---|---|---|---|
| anything | no | either way | SKIP: fixed, or not yet introduced |
| anything | yes | yes | APPLY; the reason says when the number is wrong |
| anything | yes | no, or it is gone | DRIFT, naming the nearest names |
| in range | cannot be told | either way | DRIFT |
| out of range | cannot be told | either way | SKIP, unproven |
| (no source, a released version) | as reviewed | as reviewed | as above |
| (no source, any other version) | | | by the number, unproven: give `--mcore PATH` |

There are four more decisions:

- CONFLICT: two replacements have one target, or `megatron.core` and `megatron.training` are from different
  trees.
- OWNED: MindSpeed replaces the target.
- TRAP: the recipe meets a defect that no narrow patch mends. The command ends with 2.
- UNVOUCHED: in a program that is not ours ([enable.md](enable.md)), the patch assumes something of its
  caller, and nobody vouches for that.

DRIFT and CONFLICT end with exit code 4 where the job needs the patch; `--allow-drift ID` continues.

A target is reviewed by its code. It is reviewed by its signature (parameters, defaults, decorators) where the
wrapper calls through to it or never calls it, and does not depend on its body. A trap is decided by its
source, as a patch is. The number decides about a trap only where there is no source, or where the source does
not tell; the line says so.

No recipe has the features `megatron-balancing`, `megatron-mtp-loss` and `megatron-tied-head`. In
`mcore-bundle train` the engine computes those losses and that head itself. Their patches and traps are for
jobs that leave them to megatron. `mcore-bundle patches plan` without a recipe is about such jobs.

Patches are applied when megatron is imported, before other code sees the module, and only to the file that
they were planned for. Taking a patch back restores the original object. Modules that were built meanwhile
keep the hooks of a patch (mla-thd-value-padding). `tests/patches` puts a wrapper on every target of every
release and takes it off again.
"""


_SENDING = """\
## Sending one

`mcore-bundle patches new ID`, in a checkout after `make lint`, writes the files that a patch starts from, and
prints the steps from them to a passing test: the evidence, the releases that have it, the check, the
replacement, this page. A patch is sent as one pull request with exactly these files and the lines that the
steps name. The pull request says:

- what a user sees, with the smallest program or recipe that shows it, and in which release
- where upstream knows of it (an issue, a commit), or how it was found, and the first release without it
- what `patches verify ID` printed before the replacement and after it, on which machine
- what it assumes of its caller, if anything: the loss function, the labels, what has been summed

The replacement calls the original, and copies nothing of it. Where no narrow replacement is possible, the
defect is a `Trap` instead, with what to do. A defect without a measurement is not accepted. A defect that
only an accelerator shows says so by `NotProvable`, with what was printed there.
"""


_NOT_SO = """\
## Reported, and not in the list

- Multi-token prediction of a loss function with two outputs is said to lack the context-parallel size
  (NVIDIA/Megatron-LM#3959). It does not: `prediction_with_two_outputs` in `tests/upstream` agrees in every
  release.
- dp_reshardable is said to save lists of different lengths as what is common to all ranks
  (radixark/Megatron-LM#66, slime#1221). That was tried and not reproduced.
"""


_KINDS = {
    DefectKind.SILENT: "silent: other numbers, or code of others that runs; nothing tells of it",
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
        "## Seams\n\nPrivate names that the bundle relies on without replacing them.\n",
        table(
            ("seam", "releases", "names", "use"),
            ((s.id, s.range or "all", _code(s.targets), f"{s.use}. {s.why}") for s in SEAMS),
        ),
        "## MindSpeed\n\nTargets of ours that MindSpeed may replace, read at these commits: "
        + ", ".join(f"{branch} (`{commit[:8]}`)" for commit, branch in mindspeed.BRANCH_BY_COMMIT.items())
        + ".\n",
        table(
            ("target", "branches"),
            ((f"`{t}`", ", ".join(sorted(b))) for t, b in mindspeed.REPLACING_BRANCHES.items()),
        ),
        "A job of ours imports MindSpeed where its recipe says so (`backend_options.mindspeed`), at the head"
        " of the branch for its megatron-core. The job tells MindSpeed to do little. MindSpeed then"
        " replaces:\n",
        table(
            ("branch", "megatron-core", "targets of ours"),
            (
                (of.branch, of.megatron_range, _code(sorted(of.replaces)))
                for of in mindspeed.TRAINING_BRANCHES
            ),
        ),
        "MegatronAdaptor, with which NPUs run 0.18, was not read. Where it is installed beside such a job,"
        " and in somebody else's environment, every patch for NPUs is DRIFT. Jobs of ours without MindSpeed"
        " import neither, and refuse to begin where other code has imported one of them.\n",
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
        ("read in", _code(patch.evidence)),
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
    reviewed = ", reviewed by its signature" if replacement.by_signature else ""
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
