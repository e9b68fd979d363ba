"""The fields of our requests are SGLang's: as read in wheels, and in the wheels where they can be had."""

import dataclasses
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bundle.rollouts import Request, Sampling
from bundle.rollouts.sglang import protocol
from tests.rollouts.sglang.contract_server import CLASSES
from tests.rollouts.sglang.read_fields import read_fields

FIELDS = json.loads((Path(__file__).parent / "fields.json").read_text())
VERSIONS = ["0.5.16", "0.5.20", "0.5.21", "0.5.23"]
ROUTES = [
    route for _, route in inspect.getmembers(protocol, inspect.isclass) if route.__subclasses__() == []
    and issubclass(route, protocol.ServerRequest)
]  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_every_field_that_we_send_is_one_of_that_release(version):
    posts = [route for route in ROUTES if route.method == "POST"]
    assert {route.path for route in posts} <= CLASSES.keys() and len(posts) == 10
    has_sessions = "BeginWeightUpdateReqInput" in FIELDS[version]
    for route in posts:
        sent = {field.name for field in dataclasses.fields(route)}
        if route is protocol.CheckWeights and not has_sessions:
            sent.remove("selector")
        assert sent <= {*FIELDS[version][CLASSES[route.path]]}
    request = protocol.build_generate(
        Request((1,), 0, 0), Sampling(1.0, 2, (1,), seed=0, step=0, greedy=True), None
    )
    assert request.sampling_params.keys() <= {*FIELDS[version]["SamplingParams"]}


def test_sessions_came_with_0_5_21():
    are_known = ["BeginWeightUpdateReqInput" in FIELDS[version] for version in VERSIONS]
    assert are_known == [False, False, True, True]


@pytest.mark.processes
@pytest.mark.parametrize("version", VERSIONS)
def test_the_fields_are_those_of_the_wheel(version, tmp_path):
    folder = os.environ.get("BUNDLE_SGLANG_WHEELS")
    if folder is None:
        pytest.skip("BUNDLE_SGLANG_WHEELS names no folder of wheels, or `fetch` to fetch them with pip")
    if folder == "fetch":
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-q"]
        result = subprocess.run([*command, "-d", str(tmp_path), f"sglang=={version}"], capture_output=True)
        if result.returncode:
            pytest.skip(f"sglang {version} cannot be fetched")
        folder = str(tmp_path)
    wheels = sorted(Path(folder).glob(f"sglang-{version}-*.whl"))
    if not wheels:
        pytest.skip(f"{folder} has no wheel of sglang {version}")
    assert read_fields(wheels[0]) == FIELDS[version]
