"""Layout strings: read as megatron-core reads them, and every way to be wrong has its message."""

import json
import tracemalloc

import pytest
from packaging.version import Version

from bundle.recipe.stages import MAX_LAYOUT_LETTERS, find_stage_violations, parse_layout


@pytest.mark.world
def test_layouts_mean_what_megatron_says(core):
    if Version(core.version) < Version("0.13"):
        pytest.skip("0.12 has no layout string")
    (said,) = core.world.run("tests.recipe.dealing", 1, timeout=400)
    depths = (1, 2) if Version(core.version) >= Version("0.14") else ()
    wanted = {"refused", *(f"taken with {depth} MTP layers" for depth in (0, *depths))}
    assert set(json.loads(said.splitlines()[-1])) == wanted


def test_a_published_layout_is_written_out():
    held = parse_layout("Et*3|(tt|)*29,m|L")
    assert held == ("Ettt", *["tt"] * 29, "m", "L")
    assert not list(find_stage_violations(held, 16, layers=61, mtp_layers=1))


@pytest.mark.parametrize(
    ("layout", "at"),
    [
        ("Ettx|tL", "character 4 on, 'x|tL'"),
        ("E t|tL", "character 2 on"),
        ("(tt|)|L", "character 1 on"),
        ("E(t(t)*2)*2L", "character 2 on"),
        ("E()*2L", "character 2 on"),
        ("Et*|L", "character 3 on"),
        ("Et*-1|L", "character 3 on"),
        ("E(t)*2*3L", "character 7 on"),  # megatron reads four layers
        ("Et*1,0L", "character 6 on"),  # megatron reads ten
        ("Et*٣L", "character 3 on"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(layout, at, messages):
    with pytest.raises(ValueError) as refused:
        parse_layout(layout)
    assert at in str(refused.value)
    messages(refused.value)


@pytest.mark.parametrize(
    "layout", [f"t*{MAX_LAYOUT_LETTERS + 1}", "t*999999999999999999999", "(t*9999)*9999", "t*9999" * 9]
)
def test_a_layout_of_a_hostile_size_is_refused_before_it_is_written_out(layout):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=f"{MAX_LAYOUT_LETTERS} letters"):
            parse_layout(layout)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert len(parse_layout(f"t*{MAX_LAYOUT_LETTERS}")[0]) == MAX_LAYOUT_LETTERS


@pytest.mark.parametrize(
    ("layout", "pp", "layers", "depth", "named"),
    [
        ("Et|t|tL", 2, 3, 0, ["pp 2"]),
        ("Et|t|mL", 2, 2, 1, ["pp 2"]),
        ("Et||t|tL", 2, 3, 0, ["stage 2"]),
        ("tE|tL", 2, 2, 0, ["E, "]),
        ("Et|EtL", 2, 2, 0, ["E, "]),
        ("Et|Lt", 2, 2, 0, ["L, "]),
        ("Et|t", 2, 2, 0, ["L, "]),
        ("EtL|t", 2, 2, 0, ["L, "]),
        ("Et|tL", 2, 3, 0, ["has 3"]),
        ("Et|tL", 2, 2, 1, ["model.mtp.layers"]),
        ("Et|tmL", 2, 2, 0, ["model.mtp.layers"]),
        ("Et|mtL", 2, 2, 1, ["(m)"]),
        ("Et|tm|mL", 3, 2, 2, ["(m)"]),
        ("Et|tm|L|L", 2, 2, 1, ["L, ", "stage 2"]),
        ("Et|t|m|L", 2, 2, 1, ["stage 3"]),
    ],
)
def test_everything_that_is_misplaced_is_said(layout, pp, layers, depth, named, messages):
    said = list(find_stage_violations(parse_layout(layout), pp, layers=layers, mtp_layers=depth))
    assert all(value in why for value, why in zip(named, said, strict=True))
    messages("\n".join(said))
