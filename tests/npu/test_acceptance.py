"""The acceptance of emulated NPUs: every part passes, and the file says that they are none."""

import json

import pytest

from bundle.errors import UsageError
from tests.npu.test_job import LOCAL_PATCH, command, folder  # noqa: F401  (a fixture)
from tools import compatibility

pytestmark = pytest.mark.npu

PARTS = (
    "environment", "operator flash", "operator rms_norm", "operator swiglu",
    "operator rotary", "operator permute", "operator grouped_experts", "operator adamw",
    "collectives", "five steps in fp32", "five steps in bf16", "checkpoint", "two ranks", "patches",
)  # fmt: skip


def test_emulated_npus_are_accepted_as_emulated(folder):  # noqa: F811
    ended = command(folder, "doctor", "--acceptance", "--json", "--backend", "ascend", timeout=7200)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    file = folder / "acceptance.json"
    file.write_text(ended.stdout)
    told = json.loads(ended.stdout)
    assert told["emulated"] and told["device"] == "910B2C (emulated)"
    assert {part["name"]: part["status"] for part in told["parts"]} == dict.fromkeys(PARTS, "passed")
    assert told["parts"][-1]["cause"] == f"on {told['device']} proven {LOCAL_PATCH}"
    (row,) = compatibility.recorded(file)
    assert row.device_name_unless_emulated == ""
    file.write_text(json.dumps(told | {"combination": told["combination"] | {"device": "910B3"}}))
    with pytest.raises(UsageError, match="910B3"):
        compatibility.recorded(file)
