"""The Dockerfiles as BuildKit's own checks and hadolint read them; and what cannot be run here, named."""

import subprocess

import pytest

from tests.images import baking, tools

pytestmark = pytest.mark.images


def test_buildkit_has_no_warnings_for_any_target(engine, target, tmp_path):
    # Without contexts: the check refuses a target in the place of the wheelhouse.
    targets = {name: target(name) | {"contexts": {}} for name in baking.resolved(engine, "all")}
    said = baking.build(engine, tmp_path, targets, "--call=check")
    assert "WARNING" not in said, said
    assert said.count("Check complete") == len(targets), said


def test_hadolint_has_nothing_to_say():
    try:
        program = tools.hadolint()
    except tools.Missing as missing:
        pytest.skip(f"not on this machine: {missing}")
    files = sorted((baking.ROOT / "images").glob("*/Dockerfile"))
    found = subprocess.run([program, *files], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (
            "the attestations",
            "the SBOM is made by an image of a registry, and only a registry keeps provenance",
        ),
        ("the GPU and NPU images as a whole", "their bases, with nvcc and CANN, are in registries"),
    ],
)
def test_not_run_here(what, why):
    pytest.skip(f"not run here: {what}: {why}")
