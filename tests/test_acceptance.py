"""What an acceptance says of a device: nothing that it has not seen, and of emulated ones that they are."""

import json
import math
from pathlib import Path

import pytest

from bundle import acceptance, capabilities
from bundle.acceptance import AcceptancePart, build_document, run_acceptance
from bundle.environment import BACKENDS, packages
from bundle.environment.hardware import build_preset, detect
from bundle.environment.machine import fail, ok
from bundle.preflight import ProbeResult
from tests.environment.machines import recorded

PASSED = (
    AcceptancePart("environment", ProbeResult()),
    AcceptancePart("collectives", ProbeResult(note="hccl adds up int8")),
)
CPU = detect("cpu", recorded("cgroup-v1"))


def test_every_operator_and_kernel_that_a_backend_may_call_is_measured():
    for backend in BACKENDS:
        can = capabilities.find_capabilities(backend)
        ours = [operator.name for operator in acceptance.OPERATORS.get(backend, ())]
        wanted = [can.auto_attention.value, *(one.name for one in can.operators)] if can.operators else []
        assert ours == wanted


def test_what_no_part_was_refused_is_proven_on_the_device():
    here = build_preset("a2")
    told = build_document(here, packages.detect(), PASSED)
    assert told["passed"] and not told["emulated"] and told["device"] == here.devices[0].name
    seen = told["combination"]
    assert seen["device"] == here.devices[0].name
    environment, collectives = PASSED
    assert seen["proven"] == [environment.name, f"{collectives.name}: {collectives.result.note}"]
    assert {"doctor", "--acceptance", "ascend"} <= set(seen["command"].split())


def test_what_was_skipped_is_not_proven_and_what_failed_leaves_no_combination():
    skipped = build_document(
        CPU, packages.detect(), [*PASSED, AcceptancePart("two ranks", ProbeResult(skipped="one device"))]
    )
    assert skipped["passed"] and "two ranks" not in str(skipped["combination"]["proven"])
    assert [part["status"] for part in skipped["parts"]] == ["passed", "passed", "skipped"]
    failed = build_document(
        CPU, packages.detect(), [*PASSED, AcceptancePart("checkpoint", ProbeResult(wrong="lost"))]
    )
    assert not failed["passed"] and failed["combination"] is None
    assert failed["parts"][-1]["cause"] == "lost"


def test_a_device_that_is_called_emulated_is_none():
    here = build_preset("a2")
    devices = tuple(
        type(device)(**vars(device) | {"name": f"{device.name} (emulated)"}) for device in here.devices
    )
    told = build_document(here._replace(devices=devices), packages.detect(), PASSED)
    assert told["emulated"] and told["combination"]["device"] == "emulated"


def test_an_unfit_environment_is_all_that_is_looked_at(tmp_path: Path):
    (part,) = list(
        run_acceptance(
            CPU, [ok("torch", "there"), fail("megatron-core", "not there", "install it")], tmp_path
        )
    )
    assert part.name == "environment" and part.result.wrong.startswith("megatron-core: ")


@pytest.mark.parametrize(
    ("loss", "wrong"),
    [
        (2.0, ""),
        (2.0001, ""),
        (2.003, "a loss differs from the cpu's by 0.0015; 0.001 is allowed"),
        (math.nan, "a loss differs from the cpu's by nan; 0.001 is allowed"),
    ],
)
def test_losses_are_as_near_as_is_said(loss, wrong):
    found = acceptance.judge_losses(
        {1: {"loss": 5.0}, 2: {"loss": loss}}, {1: {"loss": 5.0}, 2: {"loss": 2.0}}, 1e-3, "the cpu's"
    )
    assert found.wrong == wrong and set(found.measured) == {"relative distance"}


def test_a_step_that_was_validated_keeps_both_losses_and_no_count():
    rows = (
        {"step": 5, "train/loss": 2.0, "train/mtp_1_loss": 3.0, "train/samples": 8},
        {"step": 5, "validation/loss": 2.5},
    )
    assert acceptance.parse_losses("\n".join(map(json.dumps, rows))) == {
        5: {"train/loss": 2.0, "train/mtp_1_loss": 3.0, "validation/loss": 2.5}
    }


def test_losses_of_other_steps_are_no_answer():
    assert acceptance.judge_losses(
        {1: {"loss": 5.0}}, {1: {"loss": 5.0}, 2: {"loss": 2.0}}, 1.0, "the cpu's"
    ).wrong
    assert acceptance.judge_losses({1: {"mtp": 5.0}}, {1: {"loss": 5.0}}, 1.0, "the cpu's").wrong


@pytest.mark.slow
@pytest.mark.world
def test_two_ranks_exchange_every_type_and_a_wrong_sum_is_named(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("megatron.core")
    found = acceptance.check_two_rank_collectives("cpu", 2)
    assert found.status == "passed" and "gloo" in found.note and "int8" in found.note
    monkeypatch.setattr(acceptance, "COLLECTIVE_MEASUREMENT_FUNCTION", "tests.verification.leaving:wrong_sum")
    wrong = acceptance.check_two_rank_collectives("cpu", 2).wrong
    assert "int8" in wrong and "[3, 7]" in wrong and "[3, 6]" in wrong
    assert acceptance.check_two_rank_collectives("cpu", 1).skipped == "needs two devices"


def test_patches_are_proven_on_a_device_and_never_just_so(monkeypatch: pytest.MonkeyPatch):
    seen = {"a": "proven", "b": "proven", "c": "not provable here"}
    told = {
        "device": "910B2C (emulated)",
        "results": [{"id": patch, "status": status} for patch, status in seen.items()],
    }
    monkeypatch.setattr(acceptance, "_run_verb", lambda words, environ: (0, json.dumps(told), ""))
    said = "on 910B2C (emulated) proven a, b; not provable here c"
    assert acceptance._run_patches_verify("ascend").note == said
    monkeypatch.setattr(acceptance, "_run_verb", lambda words, environ: (4, json.dumps(told), ""))
    assert acceptance._run_patches_verify("ascend").wrong == said
