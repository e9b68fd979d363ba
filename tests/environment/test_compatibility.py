"""Every combination of packages that breaks, and the ones that do not."""

import pytest

from bundle.environment.doctor import AUTOLOAD_VARIABLE, check_packages
from bundle.environment.hardware import detect
from bundle.environment.machine import DetectedValue, Level
from tests.environment.machines import recorded
from tests.environment.trees import install, install_megatron, install_torch, stack_of

NO_CANN: DetectedValue[str] = DetectedValue(None, "no toolkit")
CANN = DetectedValue("9.0.0", "a file")
CPU, CUDA, NPU = "cgroup-v1", "h200-x2", "a3-26.0"


def bad(site, machine=CPU, cann=NO_CANN, environ=None):
    """(subject, cause) of what is not ok; every such finding names a fix."""
    findings = list(check_packages(stack_of(site), detect(machine=recorded(machine)), cann, environ or {}))
    assert all(finding.fix for finding in findings if finding.level is not Level.OK)
    return [(f.subject, f.cause) for f in findings if f.level is not Level.OK]


def only(problems, subject, *parts):
    assert [name for name, _ in problems] == [subject]
    assert all(part in problems[0][1] for part in parts), problems


def test_nothing_installed_names_both_with_the_command(tmp_path):
    findings = list(check_packages(stack_of(tmp_path), detect(machine=recorded(CPU)), NO_CANN, {}))
    assert [(f.subject, f.level) for f in findings] == [("torch", Level.FAIL), ("megatron-core", Level.FAIL)]
    assert all("mcore-bundle[cpu]" in finding.fix for finding in findings)


def test_a_complete_cpu_environment_is_fine(tmp_path):
    install_torch(tmp_path)
    install_megatron(tmp_path)
    assert bad(tmp_path) == []


def test_a_complete_cuda_environment_is_fine(tmp_path):
    install_torch(tmp_path, cuda="13.0")
    install_megatron(tmp_path)
    install(tmp_path, "transformer-engine", "2.14.1")
    assert bad(tmp_path, CUDA) == []


def test_a_cpu_build_of_torch_beside_gpus(tmp_path):
    install_torch(tmp_path, "2.13.0+cpu")
    install_megatron(tmp_path)
    install(tmp_path, "transformer-engine", "2.14.1")
    only(bad(tmp_path, CUDA), "torch", "2.13.0+cpu")


def test_a_driver_that_is_too_old(tmp_path):
    install_torch(tmp_path, cuda="13.0")
    install_megatron(tmp_path)
    install(tmp_path, "transformer-engine", "2.14.1")
    only(bad(tmp_path, "a100-mig"), "torch", "CUDA 13", "driver 580", "535.104.05")
    install_torch(tmp_path, cuda="12.8")
    assert bad(tmp_path, "a100-mig") == []


def test_transformer_engine_is_wanted_on_cuda_only(tmp_path):
    install_torch(tmp_path, cuda="13.0")
    install_megatron(tmp_path)
    only(bad(tmp_path, CUDA), "transformer-engine", "not installed")
    assert bad(tmp_path, CPU) == []


def test_torch_npu_without_cann_breaks_import_torch(tmp_path):
    install_torch(tmp_path)
    install_megatron(tmp_path)
    install(tmp_path, "torch-npu", "2.13.0")
    only(bad(tmp_path), "torch-npu", "`import torch`", "no toolkit")
    assert bad(tmp_path, environ={AUTOLOAD_VARIABLE: "0"}) == []
    assert bad(tmp_path, NPU, CANN) == []


def test_torch_npu_beside_gpus(tmp_path):
    install_torch(tmp_path, cuda="13.0")
    install_megatron(tmp_path)
    install(tmp_path, "transformer-engine", "2.14.1")
    install(tmp_path, "torch-npu", "2.13.0")
    only(bad(tmp_path, CUDA, CANN), "torch-npu", "accelerator")


def test_torch_npu_for_another_torch(tmp_path):
    install_torch(tmp_path)
    install_megatron(tmp_path)
    install(tmp_path, "torch-npu", "2.7.1.post8")
    only(bad(tmp_path, NPU, CANN), "torch-npu", "2.7.1.post8", "2.13.0")


def test_npus_want_torch_npu(tmp_path):
    install_torch(tmp_path)
    install_megatron(tmp_path)
    only(bad(tmp_path, NPU), "torch-npu", "NPUs")


@pytest.mark.parametrize(("version", "needs"), [("0.17.1", False), ("0.18.0", True), ("0.19.2", True)])
def test_triton_is_needed_from_0_18(tmp_path, version, needs):
    install_torch(tmp_path)
    install_megatron(tmp_path, version)
    assert [subject for subject, _ in bad(tmp_path)] == (["triton"] if needs else [])
    for machine, fix in ((CPU, "pip install triton"), (NPU, "pip install triton-ascend")):
        found = check_packages(stack_of(tmp_path), detect(machine=recorded(machine)), NO_CANN, {})
        assert [f.fix for f in found if f.subject == "triton"] == ([fix] if needs else [])
    install(tmp_path, "triton", "3.9.0")
    assert bad(tmp_path) == []


def test_the_source_says_whether_triton_is_needed_before_the_number_does(tmp_path):
    install_torch(tmp_path)
    install_megatron(tmp_path, "0.19.2")
    experts = tmp_path / "megatron/core/transformer/moe"
    (experts / "ops").mkdir(parents=True)
    (experts / "paged_stash.py").write_text("def stash(): import triton\n")
    assert bad(tmp_path) == []
    (experts / "ops/paged_stash.py").write_text("import torch\nimport triton\n")
    only(bad(tmp_path), "triton", "read in transformer/moe/ops/paged_stash.py")


@pytest.mark.parametrize("version", ["0.11.0", "0.20.0"])
def test_a_release_that_nobody_reviewed(tmp_path, version):
    install_torch(tmp_path)
    install_megatron(tmp_path, version)
    install(tmp_path, "triton", "3.9.0")
    only(bad(tmp_path), "megatron-core", version)


def test_two_copies_of_megatron(tmp_path):
    first, second = tmp_path / "checkout", tmp_path / "site"
    for site in (first, second):
        install_megatron(site)
    install_torch(second)
    findings = list(check_packages(stack_of(first, second), detect("cpu", recorded(CPU)), NO_CANN, {}))
    (copies,) = [f for f in findings if f.level is not Level.OK]
    assert (copies.subject, copies.level) == ("megatron-core", Level.WARN)
    assert f"{first} is imported" in copies.cause
    assert str(second) in copies.cause


def test_halves_of_megatron_from_two_trees(tmp_path):
    first, second = tmp_path / "checkout", tmp_path / "site"
    (first / "megatron/training").mkdir(parents=True)
    (first / "megatron/training/__init__.py").touch()
    install_megatron(second)
    install_torch(second)
    findings = check_packages(stack_of(first, second), detect("cpu", recorded(CPU)), NO_CANN, {})
    levels = {f.subject: f.level for f in findings}
    assert levels["megatron-core"] is Level.FAIL
