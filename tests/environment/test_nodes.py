"""In what nodes differ, by what their doctors said."""

import json
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundle.environment import nodes
from bundle.errors import UsageError

REPORT: dict[str, Any] = {
    "schema": 1,
    "kernel": "6.8.0",
    "python": "3.11.7",
    "packages": {"torch": "2.13.0", "megatron-core": "0.16.1 at abc"},
    "findings": [{"subject": "torch", "level": "ok", "cause": "torch 2.13.0 in /here", "fix": ""}],
    "hardware": {
        "backend": "cuda",
        "reason": "two GPUs",
        "devices": [
            {
                "index": n,
                "number": n,
                "name": "H200",
                "identity": f"GPU-{n}",
                "memory": {"value": 150 << 30, "reason": "NVML"},
            }
            for n in range(2)
        ],
        "driver": {"value": "580.65.06", "reason": "nvidia-smi"},
        "rdma": {"value": ["mlx5_0/1: InfiniBand 400 Gb/sec"], "reason": "sysfs"},
        "host": {"memory": {"value": 2.0 * 2**40, "reason": "/proc/meminfo"}},
        "notes": [],
    },
    "image": None,
}


def cluster(count: int = 5) -> dict[str, dict[str, Any]]:
    """Nodes that are alike, but for what no two machines have in common."""
    reports = {f"gpu{n}": deepcopy(REPORT) | {"node": f"gpu{n}"} for n in range(count)}
    for n, report in enumerate(reports.values()):
        for device in report["hardware"]["devices"]:
            device["identity"] += f"-{n}"
        report["hardware"]["host"]["memory"] = {"value": 2.0 * 2**40 + 4096 * n, "reason": f"node {n}"}
        report["findings"][0]["cause"] = f"torch 2.13.0 in /home/{n}"
    return reports


def test_nodes_that_are_alike_differ_in_nothing():
    assert list(nodes.differences(cluster())) == []


def test_what_differs_is_named_with_the_nodes_that_have_it():
    reports = cluster()
    reports["gpu3"]["packages"]["torch"] = "2.12.0"
    reports["gpu4"]["hardware"]["driver"]["value"] = "575.57.08"
    del reports["gpu4"]["hardware"]["devices"][1]
    reports["gpu4"]["hardware"]["rdma"]["value"] = []
    reports["gpu0"]["findings"].append(
        {"subject": "memory", "level": "fail", "cause": "too little", "fix": ""}
    )
    most = "gpu0, gpu1, gpu2 and 1 more"
    assert list(nodes.differences(reports)) == [
        "findings.memory: nothing (gpu1, gpu2, gpu3 and 1 more); too little (gpu0)",
        f"hardware.devices.1.memory: 150 GiB ({most}); nothing (gpu4)",
        f"hardware.devices.1.name: H200 ({most}); nothing (gpu4)",
        f"hardware.devices.1.number: 1 ({most}); nothing (gpu4)",
        f"hardware.devices.count: 2 ({most}); 1 (gpu4)",
        f"hardware.driver: 580.65.06 ({most}); 575.57.08 (gpu4)",
        f"hardware.rdma.0: mlx5_0/1: InfiniBand 400 Gb/sec ({most}); nothing (gpu4)",
        f"hardware.rdma.count: 1 ({most}); 0 (gpu4)",
        "packages.torch: 2.13.0 (gpu0, gpu1, gpu2 and 1 more); 2.12.0 (gpu3)",
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.lists(
        st.fixed_dictionaries({"hardware": JSON, "packages": JSON, "findings": st.lists(JSON)}), max_size=3
    )
)
def test_no_report_breaks_it_and_a_report_is_like_itself(reports):
    every = {str(n): report for n, report in enumerate(reports)}
    assert all(line.isprintable() for line in nodes.differences(every))
    assert list(nodes.differences({"a": REPORT, "b": REPORT})) == []


def bundle(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "bundle", "doctor", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_this_machine_is_like_itself_and_unlike_another(tmp_path):
    here = tmp_path / "here.json"
    here.write_text(bundle("--json").stdout)
    alike = bundle("--compare", str(here), str(here))
    assert (alike.returncode, alike.stdout) == (0, "2 nodes are alike\n")
    there = json.loads(here.read_text())
    there["packages"]["torch"], there["node"] = "1.0", "other"
    (tmp_path / "there.json").write_text(json.dumps(there))
    unlike = bundle("--compare", str(here), str(tmp_path / "there.json"))
    assert unlike.returncode == 3 and unlike.stdout.startswith("packages.torch: ")
    assert "1.0 (other)" in unlike.stdout


@pytest.mark.parametrize("words", [("--compare",), ("a.json", "b.json")])
def test_reports_and_the_flag_go_together(words):
    assert bundle(*words).returncode == 2


def test_all_that_is_no_report_is_named(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(UsageError) as refused:
        nodes.read([Path(tmp_path, "a"), Path(tmp_path, "b")])
    assert str(refused.value).count("not what `mcore-bundle doctor --json` printed") == 2
    with pytest.raises(UsageError, match="takes two reports or more"):
        (tmp_path / "c").write_text(json.dumps(REPORT))
        nodes.read([tmp_path / "c"])
