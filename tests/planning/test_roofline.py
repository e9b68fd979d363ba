"""The predicted time of a step, against the measurements in docs/performance.md and by hand."""

import re
from pathlib import Path

import pytest

from bundle.architectures import Architecture
from bundle.planning import Plan, build_plan
from bundle.planning.roofline import COEFFICIENTS_BY_TERM, StepTime
from bundle.planning.size import compute_model_size, list_layer_flops
from bundle.recipe import list_built_in, load, loss_chunks
from tests.planning.measured import CASES, FP8, GPU, PACKS

PAGE = (Path(__file__).parents[2] / "docs/performance.md").read_text()
TABLE = PAGE.partition("### What `tune` predicts")[2].partition("\n### ")[0]


def plan(case: str, *more: str, nodes: int = 1) -> Plan:
    name, changes, devices = CASES[case]
    recipe = load(GPU / f"{name}.yaml", [*changes, *more])
    return build_plan(
        recipe, hardware_name=find_hardware(case), mcore="0.16.1", per_node=devices // nodes, nodes=nodes
    )


def predict(case: str, *more: str, nodes: int = 1) -> StepTime:
    planned = plan(case, *more, nodes=nodes)
    assert planned.layout is not None and not planned.problems
    return planned.roofline.predict(planned.recipe, planned.layout)


def list_cells() -> list[list[str]]:
    """The cells of each row of the page."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TABLE.splitlines() if "|" in line]
    return cells[2:]


def find_hardware(case: str) -> str:
    """The devices that a row was measured on: h100 or h200."""
    (devices,) = (cells[1] for cells in list_cells() if cells[0] == case)
    return devices.split()[-1].lower()


def rows() -> list[tuple[str, float, float]]:
    """(case, measured, predicted) of each row of the page, in ms."""
    return [(case, float(measured), float(predicted)) for case, _, measured, predicted in list_cells()]


def test_the_page_has_every_case():
    assert [case for case, *_ in rows()] == list(CASES)


@pytest.mark.parametrize(("case", "measured", "documented"), rows())
def test_a_prediction_is_near_the_measurement(case: str, measured: float, documented: float):
    predicted = 1000 * predict(case).total
    assert documented == pytest.approx(predicted, abs=1)
    assert predicted == pytest.approx(measured, rel=0.2)


def test_every_coefficient_names_a_heading_of_the_page():
    headings = re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)
    for name, coefficient in COEFFICIENTS_BY_TERM.items():
        place = coefficient.source.partition("; ")[2].partition(":")[0]
        is_measured = not coefficient.source.endswith(("not measured", "the same rows"))
        assert not is_measured or any(heading.startswith(place) for heading in headings), name


@pytest.mark.parametrize("name", list_built_in())
def test_layers_and_head_have_the_flops_of_the_model(name: str):
    architecture = load(name).architecture
    size, layers = compute_model_size(architecture), list_layer_flops(architecture)
    assert len(layers) == architecture.num_layers + architecture.mtp_layers
    assert sum(of.per_token + of.per_expert_token for of in layers) + count_head(architecture) == (
        size.flops_per_token
    )
    assert sum(of.per_pair for of in layers if not of.window) == size.flops_per_pair
    assert sum(of.per_pair for of in layers if of.window) == size.flops_per_windowed_pair


def count_head(of: Architecture) -> int:
    return 2 * of.vocab_size * of.hidden_size * (1 + of.mtp_layers)


def test_tensor_parallel_messages_between_nodes_take_the_network():
    """300 GB/s over a link, 50 GB/s over the network."""
    alone, apart = predict("`gqa.yaml`, TP2").communication, predict("`gqa.yaml`, TP2", nodes=2).communication
    assert apart / alone == pytest.approx(6)


def test_a_pipeline_waits_for_the_other_stage_once_or_half_with_two_chunks():
    once, half = (predict(case) for case in ("`gqa.yaml`, PP2", "`gqa.yaml`, PP2, two chunks a stage"))
    assert half.bubble == pytest.approx(once.bubble / 2, rel=0.1)
    assert 0.05 < once.bubble / once.total < 1 / 9, "the first stage is shorter than the last one"


def test_full_recomputation_adds_a_forward_pass():
    """One of three parts of the layers, but nothing to the head."""
    without, full, half = (
        predict("`gqa.yaml`", *changes).compute
        for changes in (
            (),
            ("model.recompute.granularity=full",),
            (
                "model.recompute.granularity=full",
                "model.recompute.method=block",
                "model.recompute.layers=2",
            ),
        )
    )
    assert 1.2 < full / without < 4 / 3
    assert half - without == pytest.approx((full - without) / 2)


def test_a_device_with_slower_memory_is_slower_where_memory_limits():
    """An optimizer moves bytes alone: 4.8 / 3.35 times as long on an H100 as on an H200."""
    changes = ["model.config.num_hidden_layers=36"]
    of_h100, of_h200 = (
        made.roofline.predict(made.recipe, made.layout).optimizer
        for made in (
            build_plan(load(GPU / "gqa.yaml", changes), hardware_name=name, mcore="0.16.1", per_node=1)
            for name in ("h100", "h200")
        )
        if made.layout is not None
    )
    assert of_h100 / of_h200 == pytest.approx(4.8 / 3.35)


def test_logits_that_are_not_kept_are_computed_twice(monkeypatch):
    changes = (*PACKS, "model.config.vocab_size=151936", "model.config.max_position_embeddings=8192")
    all_kept = predict("`gqa.yaml`", *changes).compute
    monkeypatch.setattr(loss_chunks, "_KEPT_LOGITS", 3456 * 151936)
    some_kept = predict("`gqa.yaml`", *changes).compute
    micro_batches, rate = 8, COEFFICIENTS_BY_TERM["products"].value
    again = micro_batches * 2 * 151936 * 4096 * (8192 - 3456) / rate
    assert some_kept - all_kept == pytest.approx(again)


def test_small_micro_batches_wait_for_the_host():
    waits = [predict("`latent.yaml`", f"train.micro_batch_size={size}").launches for size in (1, 2, 8)]
    assert waits[0] > 2 * waits[1] > 0
    assert waits[2] == 0


def test_experts_in_fp8_wait_for_the_host():
    """One expert more takes 2 launches of 50 us, and 10.5 with FP8, in 4 layers and 2 micro-batches."""
    case = "four layers of Qwen3-30B-A3B, 8 rows of 4,096, FP8 tensorwise, on H200"
    many, few = (predict(case, f"model.config.num_experts={experts}") for experts in (128, 64))
    assert min(many.launches, few.launches) > 0
    waits = (many.compute + many.launches) - (few.compute + few.launches)
    assert waits == pytest.approx(2 * 4 * 64 * (2 + 10.5) * 50e-6)
    alone, shared = (predict(case, FP8).total for case in ("`latent.yaml`", "`latent.yaml`, EP2"))
    assert shared < 0.85 * alone, "a rank of two has half of the experts"


def test_an_unknown_device_is_predicted_as_an_h200():
    recipe = load(GPU / "gqa.yaml")
    known, unknown = (
        build_plan(recipe, hardware_name=name, mcore="0.16.1", per_node=1) for name in ("h200", "a3")
    )
    assert unknown.peak is None and unknown.layout is not None
    assert "H200" in unknown.roofline.assumed_device_note and not known.roofline.assumed_device_note
    assert unknown.roofline.predict(recipe, unknown.layout).communication == 0
