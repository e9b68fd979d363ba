"""What an image knows about itself: it is what was defined, and every later change is told."""

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundle.environment import image
from bundle.environment.doctor import examine
from bundle.environment.image import (
    BuildInfo,
    compare_records,
    find_drift,
    list_distribution_versions,
    parse,
    read_own_record,
    read_record,
)
from bundle.environment.machine import Level
from bundle.errors import BundleError, EnvironmentUnfit, UsageError
from tests.environment.machines import machine_at
from tests.environment.trees import stack_of
from tests.tools.images.checkouts import ROOT
from tools.images import definition, identity

IMAGES = definition.load(ROOT)
PINS = {name: pin.version for name, pin in IMAGES.stacks["cpu"].pins.items()}


def install(directory, name, version):
    info = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if name == "megatron-core":
        package = directory / "megatron/core"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()


@pytest.fixture
def site(tmp_path, monkeypatch):
    for module in (image, identity):
        monkeypatch.setattr(module, "get_python_version", lambda: "3.11.2")
    directory = tmp_path / "site"
    install(directory, "torch", PINS["torch"] + "+cpu")
    install(directory, "megatron-core", PINS["megatron-core"])
    install(directory, "einops", "0.8.1")
    return directory


def built(site):
    return identity.stamp(IMAGES, "cpu", stack_of(site), "c" * 40, "sha256:" + "d" * 64)


def test_a_record_survives_its_file(site):
    made = built(site)
    assert parse(made.to_json()) == made
    assert made.packages == {"torch": "2.13.0+cpu", "megatron-core": "0.16.1", "einops": "0.8.1"}


def test_an_image_that_is_not_what_was_defined_is_not_stamped(site, monkeypatch):
    monkeypatch.setattr(identity, "get_python_version", lambda: "3.13.0")
    (site / "torch-2.13.0+cpu.dist-info/METADATA").write_text("Name: torch\nVersion: 2.12.0\n")
    with pytest.raises(EnvironmentUnfit) as error:
        built(site)
    assert [violation.split(":")[0].split(",")[0] for violation in error.value.violations] == [
        "torch",
        "Python 3.13.0",
    ]


def test_a_source_is_recorded_by_its_commit(site):
    for name, pin in IMAGES.stacks["ascend-mcore0.15"].pins.items():
        install(site.parent / "npu", name, pin.version)
    made = identity.stamp(IMAGES, "ascend-mcore0.15", stack_of(site.parent / "npu"))
    assert made.sources["mindspeed-core-r0.15.3"].startswith("d0d5809d")


def test_doctor_tells_every_drift(site, tmp_path, messages):
    where = tmp_path / "machine/root/opt/bundle"
    where.mkdir(parents=True)
    machine = machine_at(tmp_path / "machine")
    (where / "build-info.json").write_text(built(site).to_json())
    assert [f.level for f in told(machine, site)] == [Level.OK]
    (site / "einops-0.8.1.dist-info/METADATA").write_text("Name: einops\nVersion: 0.9.0\n")
    install(site, "surprise", "1.0")
    shutil.rmtree(site / f"torch-{PINS['torch']}+cpu.dist-info")
    found = told(machine, site)
    causes = {f.cause.partition(": ")[0]: f.cause for f in found}
    assert causes.keys() == {"torch", "einops", "surprise"} and {f.level for f in found} == {Level.WARN}
    for name, value in (("torch", f"{PINS['torch']}+cpu"), ("einops", "0.8.1"), ("surprise", "1.0")):
        assert value in causes[name]
        messages(causes[name])


def told(machine, site):
    _, findings = examine(machine, stack_of(site), "cpu")
    return [finding for finding in findings if finding.subject == "image"]


def test_outside_of_an_image_doctor_says_nothing_of_it(site, tmp_path):
    assert told(machine_at(tmp_path / "nowhere"), site) == []


def test_a_second_megatron_in_front_is_drift(site, tmp_path):
    made = built(site)
    front = tmp_path / "front"
    install(front, "megatron-core", "0.17.1")
    packages = list_distribution_versions(stack_of(front, site))
    (drift,) = find_drift(made, "3.11.2", packages)
    assert drift.startswith(f"megatron-core: {PINS['megatron-core']} ") and "0.17.1" in drift


def test_an_image_is_compared_with_the_one_that_a_job_was_made_for(site, tmp_path, messages):
    file = tmp_path / "build-info.json"
    assert read_own_record(file) is None
    one = built(site)
    file.write_text(one.to_json())
    assert read_own_record(file) == one and list(compare_records(one, read_own_record(file))) == []
    other = one.model_copy(update={"inputs": "sha256:ee", "packages": one.packages | {"torch": "2.99"}})
    inputs, torch = compare_records(one, other)
    assert inputs.startswith(f"image, inputs: {one.inputs} ") and "sha256:ee" in inputs
    assert torch.startswith(f"image, torch: {one.packages['torch']} ") and "2.99" in torch
    file.write_text("{")
    assert read_own_record(file) is None
    for records in ((None, one), (one, read_own_record(file))):
        (difference,) = compare_records(*records)
        assert one.stack in difference and "--image-record" in difference
        messages(difference)


def test_a_record_is_read_from_a_file_or_from_what_doctor_printed(site, tmp_path, messages):
    one, file = built(site), tmp_path / "said"
    for said in (
        one.to_json(),
        json.dumps({"schema": 1, "findings": [], "image": json.loads(one.to_json())}),
    ):
        file.write_text(said)
        assert read_record(file) == one
    for said, cause in (
        ("{", "line 1"),
        ("[" * 100000, "recursion"),
        ("[]", "object"),
        ('{"findings": [], "image": null}', "doctor"),
        ('{"stack": "cpu"}', "revision"),
    ):
        file.write_text(said)
        with pytest.raises(UsageError, match=cause) as error:
            read_record(file)
        assert f"--image-record {file}: " in str(error.value)
    with pytest.raises(UsageError, match="--image-record") as error:
        read_record(tmp_path / "gone")
    messages(error.value)


NAMES = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.sampled_from(["1", "2"]))


@given(before=NAMES, now=NAMES)
def test_drift_is_the_difference(before, now):
    made = BuildInfo(
        schema=1, stack="cpu", revision="", inputs="", python="3.11.2", sources={}, packages=before
    )
    told = list(find_drift(made, "3.11.2", now))
    differing = {name for name in {*before, *now} if before.get(name) != now.get(name)}
    assert {line.partition(":")[0] for line in told} == differing
    assert len(told) == len(differing)


HOSTILE = [
    "", "null", "[]", "[" * 50_000, "{" * 10, '{"schema": 2}', '{"schema": 1}', " " * (2 << 20), "\x00",
    json.dumps({"schema": 1, "stack": "x\x1b[31m", "revision": "", "inputs": "", "python": "3", "sources": {},
                "packages": {}}),
    json.dumps({"schema": 1, "stack": "x", "revision": "", "inputs": "", "python": "3", "sources": {},
                "packages": {"torch": 2}}),
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_record_is_one_finding(text, tmp_path, site):
    with pytest.raises(BundleError):
        parse(text)
    where = tmp_path / "machine/root/opt/bundle"
    where.mkdir(parents=True)
    (where / "build-info.json").write_text(text)
    found = told(machine_at(tmp_path / "machine"), site)
    assert [f.level for f in found] == [Level.WARN]
    assert "\x1b" not in found[0].cause
