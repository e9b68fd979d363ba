"""What is recorded about versions that were seen together, and what it answers."""

import json
import re
from typing import Any

import pytest

from bundle.environment import BACKENDS, compatibility, packages
from bundle.environment.compatibility import EMULATED_ACCELERATOR, Combination
from bundle.errors import UsageError


def row(core: str, *, backend: str = "cuda", torch: str = "2.11.0", **more: Any) -> dict[str, Any]:
    said = {"device": "a device", "proven": ["it"], "command": "a command", "date": "2026-01-01"}
    return {
        "backend": backend,
        "packages": {"megatron-core": core, "torch": torch, "python": "3.12.3"},
        **said,
        **more,
    }


def table(*rows: dict[str, Any], images: tuple[dict[str, Any], ...] = ()) -> compatibility.CombinationTable:
    return compatibility.parse_json(
        json.dumps({"schema": 1, "combinations": rows, "images": images}), "a test"
    )


SEVERAL = table(
    row("0.16.1"),
    row("0.16.0", date="2026-02-01"),
    row("0.19.2", device=EMULATED_ACCELERATOR, date="2026-02-01"),
    row("0.19.2", torch="2.9.0"),
    row("0.19.2", torch="2.9.0", command="another", date="2025-01-01"),
    row("0.17.1", backend="cpu"),
    images=(
        {"stack": "one", "backend": "cuda", "packages": {"megatron-core": "0.17.0"}, "unproven": ["torch"]},
        {"stack": "other", "backend": "ascend", "packages": {"megatron-core": "0.17.0"}, "unproven": []},
    ),
)


@pytest.mark.parametrize(
    ("asked", "core", "torch", "device"),
    [
        ("0.16", "0.16.1", "2.11.0", "a device"),
        ("0.16.0", "0.16.0", "2.11.0", "a device"),
        ("0.19", "0.19.2", "2.9.0", "a device"),
        ("", "0.19.2", "2.9.0", "a device"),
    ],
)
def test_the_newest_release_on_a_device_is_found(asked: str, core: str, torch: str, device: str):
    found = compatibility.resolve(SEVERAL, "cuda", asked).best
    assert found is not None
    assert (found.packages["megatron-core"], found.packages["torch"], found.device) == (core, torch, device)


def test_other_commands_in_the_same_versions_are_told_of():
    (also,) = compatibility.resolve(SEVERAL, "cuda", "0.19").same_versions
    assert also.command == "another"


def test_what_was_never_seen_has_neighbours_and_nothing_else():
    answer = compatibility.resolve(SEVERAL, "cuda", "0.17")
    assert answer.best is None and not answer.same_versions
    named = [(seen.backend, seen.packages["megatron-core"]) for seen in answer.nearest]
    assert named == [("cuda", "0.16.0"), ("cuda", "0.16.1"), ("cuda", "0.19.2"), ("cpu", "0.17.1")]
    assert [image.stack for image in answer.images] == ["one"]
    assert compatibility.resolve(SEVERAL, "cuda", "0.16.2").best is None
    assert compatibility.resolve(table(), "cuda").best is None


@pytest.mark.parametrize("asked", ["1", "0.16.1.1", "new", "0.16.x", ">=0.16"])
def test_what_is_no_version_is_refused(asked: str, messages):
    with pytest.raises(UsageError, match=re.escape(asked)) as error:
        compatibility.resolve(SEVERAL, "cuda", asked)
    messages(error.value)


def test_a_table_with_wrong_rows_is_refused_with_all_of_them():
    wrong = [row("0.16.1 "), row("0.16.1", date="soon"), row("0.16.1", proven=[]), row("0.16.1", more=1)]
    with pytest.raises(UsageError) as refused:
        table(*wrong)
    assert [line.split(".")[1] for line in refused.value.violations] == ["0", "1", "2", "3"]


def test_constraints_have_megatron_first_no_python_and_public_versions():
    found = table(row("0.16.1", torch="2.13.0+cpu")).combinations[0]
    assert list(compatibility.build_pins(found).items()) == [("megatron-core", "0.16.1"), ("torch", "2.13.0")]


def test_a_pair_is_proven_by_what_ran_beside_that_megatron_on_that_backend():
    proves = table(row("0.16.1", torch="2.13.0+cpu")).is_proven
    assert proves("cuda", "torch", "2.13.0", "0.16.1") and proves("cuda", "python", "3.12", "0.16.1")
    assert not proves("cuda", "torch", "2.13.1", "0.16.1") and not proves("cuda", "python", "3.1", "0.16.1")
    assert not proves("cpu", "torch", "2.13.0", "0.16.1") and not proves("cuda", "torch", "2.13.0", "0.16.0")
    assert not proves("cuda", "transformer-engine", "2.11.0", "0.16.1")


def test_what_runs_now_is_written_as_it_is_read():
    pytest.importorskip("torch")
    from importlib.metadata import version

    here = packages.detect()
    seen = compatibility.build_proven_combination(here, "cpu", "cpu", ["it"], "a command", core="0.99.0")
    assert seen.packages["megatron-core"] == "0.99.0" and seen.packages["torch"] == version("torch")
    assert Combination.model_validate_json(seen.model_dump_json()) == seen


@pytest.mark.parametrize("minor", range(12, 20))
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_minor_on_every_backend_is_answered_from_the_shipped_table(minor: int, backend: str):
    answer = compatibility.resolve(compatibility.load(), backend, f"0.{minor}")
    if answer.best is not None:
        assert answer.best.backend == backend
        assert answer.best.packages["megatron-core"].startswith(f"0.{minor}.")
    else:
        assert answer.nearest
    assert backend != "cpu" or answer.best is not None
