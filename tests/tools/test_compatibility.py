"""The table of versions, its page, and what images pin: none says anything that another does not."""

import json
from pathlib import Path

import pytest

from bundle.environment import compatibility
from bundle.errors import UsageError
from tools import compatibility as tool
from tools.images.definition import load as load_definition

ROOT = Path(__file__).parents[2]
TABLE = json.loads((ROOT / "bundle/environment/compatibility.json").read_text())


def test_the_page_is_up_to_date():
    said = "run: python -m tools.compatibility page > docs/compatibility.md"
    assert (ROOT / "docs/compatibility.md").read_text() == tool.markdown(compatibility.load()), said


def test_the_table_is_as_the_tool_writes_it(tmp_path):
    tool.write(tmp_path / "table.json", compatibility.load().combinations, load_definition(ROOT))
    assert json.loads((tmp_path / "table.json").read_text()) == TABLE, (
        "run: python -m tools.compatibility add"
    )


def test_every_pair_that_an_image_pins_was_seen_or_is_listed_as_not_proven():
    """Counted from the two files alone."""
    variables = json.loads((ROOT / "docker-bake.json").read_text())["variable"]
    stacks, bases = variables["STACKS"]["default"], variables["BASES"]["default"]
    images = {image["stack"]: image for image in TABLE["images"]}
    assert set(images) == set(stacks)
    for name, stack in stacks.items():
        pins = {package: pin["version"] for package, pin in stack["pins"].items()}
        (python,) = {base["python"] for key, base in bases.items() if key.split("-")[0] == stack["backend"]}
        pins["python"] = python
        assert images[name]["packages"] == pins
        seen: set[str] = set()
        for row in TABLE["combinations"]:
            there = row["packages"]
            if row["backend"] == stack["backend"] and there["megatron-core"] == pins["megatron-core"]:
                plain = {package: version.split("+")[0] for package, version in there.items()}
                plain["python"] = ".".join(plain["python"].split(".")[:2])
                seen |= {package for package, version in pins.items() if plain.get(package) == version}
        assert set(images[name]["unproven"]) == pins.keys() - seen - {"megatron-core"}, name


def test_a_row_that_was_not_run_by_a_command_names_a_page_that_has_its_versions():
    for row in TABLE["combinations"]:
        if not row.get("commit"):
            page = (ROOT / row["source"]).read_text()
            assert all(version in page for version in row["packages"].values()), row
            assert row["command"].split(" --")[0] in page and row["device"] in page


def test_what_runs_have_written_is_added_and_a_newer_row_takes_the_place(tmp_path, monkeypatch, messages):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(tool, "COMPATIBILITY_FILE", tmp_path / "table.json")
    packages = {
        "megatron-core": "0.16.1",
        "torch": "2.11.0",
        "transformer-engine": "2.11.0",
        "python": "3.12.1",
    }
    row = {"backend": "cuda", "packages": packages, "device": "x", "proven": ["old"], "command": "c"}
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    first.write_text(json.dumps({"combination": {**row, "date": "2026-01-01"}}))
    second.write_text(json.dumps({"combinations": [{**row, "date": "2026-01-02", "proven": ["new"]}]}))
    tool.add([first, second])
    written = json.loads((tmp_path / "table.json").read_text())
    assert [(seen["proven"], seen["date"]) for seen in written["combinations"]] == [(["new"], "2026-01-02")]
    (image,) = [image for image in written["images"] if image["stack"] == "cuda-mcore0.16"]
    assert image["unproven"] == ["flash-attn", "sglang"]
    second.write_text('{"results": []}')
    before = (tmp_path / "table.json").read_text()
    with pytest.raises(UsageError, match=r"second\.json") as error:
        tool.add([second])
    messages(error.value)
    assert (tmp_path / "table.json").read_text() == before


def test_what_was_emulated_is_no_hardware(tmp_path, messages):
    row = {
        "backend": "ascend",
        "packages": {"megatron-core": "0.16.1", "torch-npu": "2.13.0", "python": "3.11.7"},
        "proven": ["five steps"],
        "command": "mcore-bundle doctor --acceptance --backend ascend",
        "date": "2026-11-22",
    }
    file = tmp_path / "acceptance.json"

    def recorded(device, **document):
        file.write_text(json.dumps({"combination": {**row, "device": device}, **document}))
        return tool.recorded(file)

    (taken,) = recorded("emulated", emulated=True)
    assert taken.device_name_unless_emulated == ""
    line = next(
        line
        for line in tool.markdown(
            compatibility.CombinationTable(schema=1, combinations=(taken,), images=())
        ).splitlines()
        if line.startswith("| ascend")
    )
    assert [cell.strip() for cell in line.split("|")][7] == "" and "emulated: five steps" in line
    with pytest.raises(UsageError, match="910B3") as error:
        recorded("910B3", emulated=True)
    messages(error.value)
    with pytest.raises(UsageError, match="device"):
        recorded("910B2C (emulated)")
    assert recorded("910B3", emulated=False)[0].device_name_unless_emulated == "910B3"
    file.write_text(json.dumps({"combination": None, "passed": False}))
    with pytest.raises(UsageError, match=r"acceptance\.json") as error:
        tool.recorded(file)
    messages(error.value)
