"""docs/models.md is made from what runs have shown, of every family that is read."""

from pathlib import Path

import pytest
from packaging.version import Version

from bundle.architectures import SUPPORTED_FAMILIES
from bundle.environment.packages import MegatronCode
from bundle.planning.problems import find_missing_feature
from tests.families import record
from tests.families.loaded import LAYOUTS
from tests.models.test_loading import LAYOUTS as OF_PREDICTION
from tests.vision.adapting import LAYOUTS as OF_TOWERS
from tools.models import EVERY, markdown, run

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_is_fresh():
    assert PAGE.read_text() == markdown(), "run: python -m tools.models > docs/models.md"


def test_every_family_has_its_row_and_no_cell_is_empty():
    rows = [line for line in markdown().splitlines() if line.startswith("| `")]
    releases = record.read().keys() - {EVERY}
    assert len(rows) == len(SUPPORTED_FAMILIES) * len(releases)
    for row in rows:
        assert all(cell.strip() for cell in row.strip("|").split("|")), row


def test_what_is_recorded_is_shown():
    shown = {"forward", "gradients", "exported", "FP8", "LoRA", *LAYOUTS}
    shown |= {f"MTP {layout}" for layout in OF_PREDICTION} | {f"LoRA {layout}" for layout in OF_TOWERS}
    for release, families in record.read().items():
        assert families.keys() <= set(SUPPORTED_FAMILIES)
        code = None if release == EVERY else MegatronCode(Version(release))
        refused = {family for family in families if code and find_missing_feature(family, code)}
        assert not refused, f"{release} takes none of these: they were run with another release"
        for seen in families.values():
            assert seen.keys() <= ({"config"} if release == EVERY else shown)


@pytest.mark.parametrize(
    ("family", "column", "runs"),
    [
        ("qwen3_vl", -2, [f"LoRA {layout}" for layout in OF_TOWERS]),
        ("glm4_moe", -1, [f"MTP {layout}" for layout in OF_PREDICTION]),
        ("mimo", -1, [f"MTP {layout}" for layout in OF_PREDICTION if "ep" not in layout]),
    ],
)
def test_a_cell_of_several_runs_wants_all_of_them(family, column, runs):
    assert run(family, dict.fromkeys(runs, 2e-8))[column] == "2e-08"
    for missing in runs:
        assert run(family, {what: 2e-8 for what in runs if what != missing})[column] == "not run"


def test_only_runs_that_are_for_the_record_change_it(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    monkeypatch.delenv("FAMILIES_RECORD", raising=False)
    record.note("0.16.1", "forward", {"llama": 1e-7})
    monkeypatch.setenv("FAMILIES_RECORD", str(path))
    record.note("0.16.1", "forward", {"llama": 1.26e-6, "qwen3": 3e-7})
    record.note("0.16.1", "pp2", {"llama": 2e-7})
    assert record.read(path) == {
        "0.16.1": {"llama": {"forward": 1e-6, "pp2": 2e-7}, "qwen3": {"forward": 3e-7}}
    }
