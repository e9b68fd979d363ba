"""Models that see images compute what transformers' own classes do, the tower's gradients included, in every
layout; what they export transformers opens as the same model."""

import json
from dataclasses import replace

import pytest
import torch

from bundle.architectures import from_config
from bundle.errors import JobFailed
from bundle.planning.size import compute_model_size
from tests.families.loaded import LAYOUTS as OF_THE_RECORD
from tests.families.record import note
from tests.vision import reference, stepping
from tests.vision.cases import CASES
from tests.vision.rank import ALONE, EXPORTED, LAYOUTS, NAMES, cases_of, recipe

QUICK = (ALONE, "recomputed pp2 laid out", "ep2", "packed cp2", "packed tp2")  # what `make test` runs
AGREES = 1e-5  # of the largest log-probability
OF_GRADIENTS = 2e-5  # of the largest in a tensor; both sides are float32
OF_A_STEP = 1e-4  # of the largest change in a tensor: the difference of two float32 numbers
OF_NATS = 2e-5  # log-probabilities, entropies and the loss, of which the largest are some tens


@pytest.mark.world
@pytest.mark.parametrize(
    "layout", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_images_are_seen_as_transformers_sees_them(seen, core, layout):
    if layout.endswith("laid out") and core.version.startswith("0.12."):
        pytest.skip("0.12 has no layout string")
    ranks = 2 if LAYOUTS[layout] else 1
    said = core.world.run("tests.vision.rank", ranks, str(seen), layout, timeout=500)
    found = json.loads(said[0].splitlines()[-1])
    assert found.keys() == {case.name for case in cases_of(layout)}
    assert not {name: far for name, far in found.items() if not far[0] <= AGREES}
    assert not {name: far for name, far in found.items() if not far[1] <= OF_GRADIENTS}
    assert not {name: far for name, far in found.items() if not far[2] <= OF_NATS}
    if layout in OF_THE_RECORD:
        note(core.version, layout, by_family(found, 0))
    if layout == ALONE:
        assert not {case.name: wrong for case in CASES if (wrong := exported(seen / case.name, case))}
        note(core.version, "gradients", by_family(found, 1))
        note(core.version, "forward", by_family(found, 2))
        note(core.version, EXPORTED, by_family(dict.fromkeys(found, (0.0,)), 0))


@pytest.mark.world
@pytest.mark.parametrize(
    "layout",
    [pytest.param(of, marks=() if of == "dp2" else pytest.mark.releases) for of in stepping.LAYOUTS],
)
def test_a_step_of_what_is_trained_is_that_of_plain_torch(seen, core, layout):
    ranks = 2 if layout != ALONE else 1
    for said in core.world.run("tests.vision.stepping", ranks, str(seen), layout, timeout=500):
        found = json.loads(said.splitlines()[-1])
        assert len(found) > len(stepping.TRAINED)
        assert not {name: wrong for name, (wrong, _) in found.items() if wrong}
        assert not {name: far for name, (_, far) in found.items() if not far <= OF_A_STEP}


def by_family(found, which):
    """The largest distance of each family's cases."""
    return {
        family: max(found[case.name][which] for case in CASES if case.family == family and case.name in found)
        for family in {case.family for case in CASES if case.name in found}
    }


def exported(directory, case):
    """What is wrong with a model that was loaded and exported."""
    theirs, numbers = reference.read(directory)
    wrong, log_probs = reference.opened(case, directory / EXPORTED, numbers)
    far = (log_probs - numbers["first log-probs"]).abs().max() / numbers["first log-probs"].abs().max()
    if not far <= 1e-9:
        wrong.add(f"log-probs are {far:.1e} off")
    ours, theirs = reference.tensors(directory / EXPORTED), reference.as_published(theirs, case)
    same = {name for name in theirs if name in ours and torch.equal(ours[name], theirs[name])}
    return sorted(wrong | (theirs.keys() ^ ours.keys()) | (theirs.keys() - same))


def test_positions_are_those_of_transformers(seen):
    import numpy as np

    from bundle.packing.images import ImageInputs

    for case in CASES:
        _, numbers = reference.read(seen / case.name)
        each = [[numbers[f"{name} {of}"] for of in ("ids", "grids", "seconds")] for name in NAMES]
        lengths = np.asarray([len(ids) for ids, _, _ in each])
        ids, grids, seconds = (torch.cat(of).numpy() for of in zip(*each, strict=True))
        images = ImageInputs.from_sequences(torch.zeros(0), grids, ids, lengths, case.vision, seconds)
        model = reference.built(case)
        theirs = torch.cat([reference.positions(model, *of) for of in each])
        assert torch.equal(images.positions, theirs)


@pytest.mark.parametrize("frozen", [("tower",), ("projector",), ("tower", "projector")])
def test_a_plan_counts_what_is_frozen(seen, frozen):
    for case in CASES:
        job = recipe(seen / case.name, {}, packed=False)
        how = {"vision": {f"freeze_{part}": True for part in frozen}}
        size = compute_model_size(job.architecture, job.model.model_validate(job.model.dump() | how))
        theirs, _ = reference.read(seen / case.name)
        of_tower = {name: of.numel() for name, of in theirs.items() if "visual." in name}
        wanted = sum(
            of for name, of in of_tower.items() if ("tower", "projector")["merger" in name] in frozen
        )
        assert size.frozen_parameters == wanted
        # Of what is frozen a checkpoint has the weights in bf16, and neither a copy nor two moments in fp32.
        whole = compute_model_size(job.architecture, job.model)
        saved = whole.count_checkpoint_bytes("bf16", job.optimizer) - size.count_checkpoint_bytes(
            "bf16", job.optimizer
        )
        assert saved == wanted * 3 * 4


def test_as_many_places_as_embeddings(messages):
    import numpy as np

    from bundle.packing.images import ImageInputs

    vision = CASES[0].vision
    ids, lengths = np.asarray([1, vision.image_token, 2]), np.asarray([3])
    with pytest.raises(JobFailed, match=r"need 2 .* have 1 ") as error:
        ImageInputs.from_sequences(torch.zeros(8, 4), np.asarray([[1, 2, 4]]), ids, lengths, vision)
    messages(error.value)
    blank = ImageInputs.from_sequences(
        torch.zeros(0), np.zeros((0, 3), np.int64), ids[:1], np.asarray([1]), vision
    )
    assert blank.index.tolist() == [-1] and blank.pixels.shape == (4, vision.values_per_patch)
    assert blank.positions.tolist() == [[0, 0, 0]] and not blank.pixels.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [case for case in CASES if "Hub" in case.name], ids=lambda case: case.family)
@pytest.mark.parametrize("size", [{}, {"num_layers": 3, "hidden_size": 48, "ffn_hidden_size": 20}])
@pytest.mark.parametrize("frozen", [(), ("tower",), ("projector",), ("tower", "projector")])
@pytest.mark.usefixtures("megatron")
def test_what_a_tower_keeps_is_predicted(case, dtype, size, frozen):
    from bundle.models.vision import VisionTower
    from bundle.packing.images import ImageInputs
    from bundle.planning.tower_activations import count_activation_bytes_per_patch
    from bundle.recipe.recipe import VisionSection
    from tests.planning.rank import Kept

    vision = replace(case.vision, **size, full_layers=())
    tower = VisionTower(replace(from_config(case.config), vision=vision), dtype)
    how = VisionSection.model_validate({f"freeze_{part}": True for part in frozen})
    for name, parameter in tower.named_parameters():
        merger = "merger" in name
        parameter.requires_grad_(("projector" if merger else "tower") not in frozen)
    grids = torch.tensor([[1, 16, 16], [1, 8, 16]])
    patches = int(grids.prod(1).sum())
    pixels = torch.randn(patches, vision.values_per_patch)
    nowhere, kept = torch.zeros(0), Kept([tower])
    with kept:
        tower(ImageInputs(pixels, grids, nowhere, nowhere))
    predicted = patches * count_activation_bytes_per_patch(vision, dtype.itemsize, how)
    assert kept.bytes == pytest.approx(predicted, rel=0.02)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.usefixtures("megatron")
def test_a_tower_is_built_of_all_that_its_config_says(case):
    pytest.importorskip("transformers")
    from bundle.models.vision import VisionTower

    built = VisionTower(from_config(case.config), torch.float32).tower.config.to_dict()
    theirs = reference._config(case).vision_config.to_dict()
    # Of positions; another word for in_channels; the tower of a model with experts is that of one without.
    without_effect = {"tokens_per_second", "in_chans", "dtype", "model_type"}
    assert {name for name in theirs if built.get(name) != theirs[name]} <= without_effect


@pytest.mark.parametrize("case", [case for case in CASES if "Hub" in case.name], ids=lambda case: case.family)
@pytest.mark.usefixtures("megatron")
def test_a_tower_reads_nothing_back_and_mixes_nothing_with_the_host(case):
    """A device without values refuses both, as one that is far away would be slowed or fail."""
    pytest.importorskip("transformers.vision_utils")
    from bundle.models.vision import VisionTower
    from bundle.packing.images import ImageInputs

    tower, nowhere = VisionTower(from_config(case.config), torch.float32).to("meta"), torch.zeros(0)
    grids = torch.tensor([[1, 8, 4], [1, 4, 4]])
    pixels = torch.zeros(48, case.vision.values_per_patch, device="meta")
    embeddings, behind = tower(ImageInputs(pixels, grids, nowhere, nowhere))
    assert {each.shape for each in (embeddings, *behind)} == {(12, 48)}
    assert len(behind) == len(case.vision.deepstack)


@pytest.mark.usefixtures("megatron")
def test_frequencies_of_a_tower_stay_in_fp32():
    from bundle.models.vision import VisionTower

    tower = VisionTower(from_config(CASES[0].config), torch.float32).bfloat16()
    assert {parameter.dtype for parameter in tower.parameters()} == {torch.bfloat16}
    assert {name: b.dtype for name, b in tower.named_buffers() if b.dtype != torch.float32} == {}
    assert any(True for _ in tower.buffers())
