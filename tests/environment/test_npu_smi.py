"""The tables of npu-smi, in every format seen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundle.environment.ascend import TableRow, parse_npu_smi_table, parse_tool_version
from tests.environment.machines import FIXTURES


def printed(machine):
    return (FIXTURES / machine / "commands" / "npu-smi_info.txt").read_text()


def test_a2_without_phy_id():
    rows = parse_npu_smi_table(printed("a2-24.1"))
    assert len(rows) == 8
    assert rows[4] == TableRow(4, 0, None, "910B2C", "OK", "0000:DA:00.0", 65536)


def test_a3_has_two_chips_per_npu_and_no_power_on_the_second():
    rows = parse_npu_smi_table(printed("a3-26.0"))
    assert [(row.npu, row.chip, row.number) for row in rows] == [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]
    assert {row.name for row in rows} == {"Ascend910"}
    assert {row.memory for row in rows} == {65536}, "57784/ 65536 has no blank before the slash"


def test_310_cards_have_a_device_column_and_no_hbm():
    rows = parse_npu_smi_table(printed("310p"))
    assert [(row.name, row.chip, row.number, row.memory) for row in rows] == [
        ("310P3", 0, 0, 44280),
        ("310P3", 1, 1, 43693),
    ]
    assert rows[1].health == "Warning"


def test_a_number_may_be_missing():
    text = printed("a3-one-die").replace("| 1     0  ", "| 1     NA ")
    assert [row.number for row in parse_npu_smi_table(text)] == [0, None]


def test_processes_are_no_devices():
    assert "python3" in printed("a3-26.0")
    assert all(row.bus.startswith("0000:") for row in parse_npu_smi_table(printed("a3-26.0")))


@pytest.mark.parametrize("machine", ["a2-24.1", "a3-26.0", "310p"])
def test_a_cut_table_gives_the_pairs_it_has(machine):
    lines = printed(machine).splitlines()
    whole = parse_npu_smi_table(printed(machine))
    counts = [len(parse_npu_smi_table("\n".join(lines[:end]))) for end in range(len(lines) + 1)]
    assert counts == sorted(counts)
    assert counts[-1] == len(whole)
    for end in range(len(lines)):
        assert parse_npu_smi_table("\n".join(lines[:end])) == whole[: counts[end]]


@given(st.text())
def test_any_text_is_read(text):
    parse_npu_smi_table(text)
    parse_npu_smi_table(
        f"| Chip  Phy-ID | Bus-Id | AICore |\n| 0 {text} | OK | - |\n| {text} | {text} | {text} |"
    )


def test_version_of_the_header():
    assert parse_tool_version(printed("a3-26.0")) == "26.0.rc2"
    assert parse_tool_version("command not found") is None
