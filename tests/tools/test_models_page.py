"""docs/models.md is made from what runs have shown, of every family that is read."""

from pathlib import Path

from bundle.architectures import SUPPORTED
from tests.families import record
from tests.families.loaded import LAYOUTS
from tests.models.test_loading import LAYOUTS as OF_PREDICTION
from tests.vision.adapting import LAYOUTS as OF_TOWERS
from tools.models import EVERY, markdown

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_is_fresh():
    assert PAGE.read_text() == markdown(), "run: python -m tools.models > docs/models.md"


def test_every_family_has_its_row_and_no_cell_is_empty():
    rows = [line for line in markdown().splitlines() if line.startswith("| `")]
    releases = record.read().keys() - {EVERY}
    assert len(rows) == len(SUPPORTED) * len(releases)
    for row in rows:
        assert all(cell.strip() for cell in row.strip("|").split("|")), row


def test_what_is_recorded_is_shown():
    shown = {"forward", "gradients", "exported", "FP8", "LoRA", *LAYOUTS}
    shown |= {f"MTP {layout}" for layout in OF_PREDICTION} | {f"LoRA {layout}" for layout in OF_TOWERS}
    for release, families in record.read().items():
        assert families.keys() <= set(SUPPORTED)
        for seen in families.values():
            assert seen.keys() <= ({"config"} if release == EVERY else shown)


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
