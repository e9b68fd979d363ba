"""Every family computes what transformers' own class does: log-probs, entropies, loss and its gradients, and
what it exports transformers opens as the same model."""

import json

import pytest
import torch

from tests.families import reference
from tests.families.cases import CASES, of_release
from tests.families.loaded import ALONE, EXPORTED, IN_BLOCKS, LAYOUTS, cases_of
from tests.families.record import note

QUICK = (ALONE, "packed cp2")  # what `make test` runs
AGREES = 1e-5  # nats
# A block of FP8 weights is 128 x 128; its numbers, up to 448 times its scale, have 32 between them at most.
BLOCK, HALF_A_STEP = 128, 16.5 / 448
OF_GRADIENTS = 2e-5  # of the largest in a tensor; both sides are float32
# Of models with gated delta nets: where each weight moves by its last bit, transformers' own log-probs
# move by 4e-5, and gradients of decays, which add up what nearly cancels, by 9e-5.
OF_NETS, OF_DECAYS = 5e-5, 3e-4


@pytest.mark.world
def test_every_family_computes_what_transformers_does(references, core):
    (said,) = core.world.run("tests.families.rank", 1, str(references), timeout=300)
    found = json.loads(said.splitlines()[-1])
    assert found.keys() == {case.name for case in of_release(core.version)}
    agrees = {case.name: OF_NETS if case.linear else AGREES for case in CASES}
    assert not {name: far for name, far in found.items() if not far[0] <= agrees[name]}
    bounds = {case.name: OF_NETS if case.linear else OF_GRADIENTS for case in CASES}
    assert not {name: far for name, far in found.items() if not far[1] <= bounds[name]}
    assert not {name: far for name, far in found.items() if not far[2] <= OF_DECAYS}
    note(core.version, "forward", by_family({name: far[0] for name, far in found.items()}))
    note(core.version, "gradients", by_family({name: max(far[1:]) for name, far in found.items()}))


@pytest.mark.world
@pytest.mark.parametrize(
    "layout", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_loaded_weights_give_what_transformers_computes(references, core, layout):
    ranks = 1 if layout == ALONE else 2
    said = core.world.run("tests.families.loaded", ranks, str(references), layout, timeout=500)
    found = json.loads(said[0].splitlines()[-1])
    assert found.keys() == {case.name for case in cases_of(layout, core.version)}
    assert not {name: distance for name, distance in found.items() if not distance <= AGREES}
    note(core.version, layout, by_family(found))
    if layout == ALONE:
        there = of_release(core.version)
        assert not {case.name: wrong for case in there if (wrong := exported(references / case.name, case))}
        note(core.version, EXPORTED, by_family(dict.fromkeys(found, 0.0)))
        far = {
            case.name: rounded(references / case.name)
            for case in there
            if (references / case.name / IN_BLOCKS).is_dir()
        }
        refused = {case.family for case in there if case.name not in far and not case.linear}
        assert refused <= {"gpt_oss"}  # stacked experts
        assert not {name: distance for name, distance in far.items() if not 0 < distance <= HALF_A_STEP}
        note(core.version, "FP8", by_family(far))


def by_family(found):
    """The largest distance of each family's cases."""
    families = {
        case.family: [found[c.name] for c in CASES if c.family == case.family and c.name in found]
        for case in CASES
    }
    return {family: max(distances) for family, distances in families.items() if distances}


def rounded(directory):
    """How far an export in blocks of FP8, times its scales, is from the weights, of a block's largest."""
    theirs, ours, far = reference.read(directory)[0], reference.tensors(directory / IN_BLOCKS), 0.0
    for name, stored in ours.items():
        if name.endswith("_scale_inv"):
            continue
        if (scales := ours.get(f"{name}_scale_inv")) is None:
            # Norms, biases, routers, embedding and head, in bf16.
            assert torch.equal(stored, theirs[name].to(stored.dtype)), name
            continue
        assert stored.dtype is torch.float8_e4m3fn
        rows, columns = stored.shape
        whole = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        gaps = (stored.double() * whole - theirs[name].double()).abs()
        for row in range(0, rows, BLOCK):
            for column in range(0, columns, BLOCK):
                block = slice(row, row + BLOCK), slice(column, column + BLOCK)
                far = max(far, float(gaps[block].max() / theirs[name][block].abs().max()))
    return far


def exported(directory, case):
    """What is wrong with a model that was loaded and exported."""
    theirs, numbers = reference.read(directory)
    wrong, log_probs = reference.opened(case, directory / EXPORTED, numbers["tokens"])
    far = (log_probs - numbers["log-probs"]).abs().max() / numbers["log-probs"].abs().max()
    if not far <= 1e-9:
        wrong.add(f"log-probs are {far:.1e} off")
    ours = reference.tensors(directory / EXPORTED)
    if case.config.get("tie_word_embeddings"):
        theirs.pop("lm_head.weight", None)  # a copy, which is written once
    same = {name for name in theirs if name in ours and torch.equal(ours[name], theirs[name])}
    return sorted(wrong | (theirs.keys() ^ ours.keys()) | (theirs.keys() - same))
