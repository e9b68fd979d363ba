"""How a process gets MindSpeed's layers, with a package of that name that only notes what is done to it."""

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest

from bundle import backends, worker
from bundle.backends import ascend
from bundle.backends.ascend import facade, mindspeed
from bundle.capabilities.ascend import (
    FACADE_TARGETS_WITH_MINDSPEED,
    REPLACEMENT_REASON_BY_TORCH_NAME,
    RESTORED_FUNCTIONS,
)
from bundle.errors import EnvironmentUnfit, PatchError
from bundle.patches import patcher
from bundle.patches.plan import PatchPlan
from tests.planning.jobs import QWEN3, job

THROUGH = job(QWEN3, backend_options={"mindspeed": True})
IN_FP8 = job(
    QWEN3,
    model={"config": QWEN3, "fp8": {"scaling": "blockwise"}},
    backend_options={"mindspeed": True},
)
ADAPTOR = """
import logging, sys
from logging.config import dictConfig
said = sys.argv[1:]
quiet = {"handlers": [], "level": "ERROR"}
dictConfig({"version": 1, "disable_existing_loggers": False, "root": quiet})
"""
MANAGER = """
taken_back = []
class Patch:
    def __init__(self, name):
        self.name = name
    def remove_patch(self):
        taken_back.append(self.name)
class MindSpeedPatchesManager:
    patches_info = {name: Patch(name) for name in (NAMES, "megatron.core.a.b")}
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A MindSpeed that can be imported, in a process that has no megatron; what the facade was told."""
    there = tmp_path / "mindspeed"
    there.mkdir()
    (there / "__init__.py").touch()
    (there / "megatron_adaptor.py").write_text(ADAPTOR)
    (there / "patch_utils.py").write_text(MANAGER.replace("NAMES", ", ".join(map(repr, RESTORED_FUNCTIONS))))
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mindspeed", "megatron")]:
        monkeypatch.delitem(sys.modules, name)
    installed: list[object] = []
    monkeypatch.setattr(facade, "replace_attributes", installed.append)
    monkeypatch.setattr(patcher, "list_applied_targets", lambda: ())
    yield installed
    for name in [name for name in sys.modules if name.partition(".")[0] == "mindspeed"]:
        del sys.modules[name]


def test_it_is_told_what_the_job_needs_and_the_process_keeps_its_own_words_and_log(package, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["rank", "--job", "a file"])
    root, handler = logging.getLogger(), logging.NullHandler()
    monkeypatch.setattr(root, "handlers", [handler])
    monkeypatch.setattr(root, "level", logging.INFO)
    mindspeed._patch_megatron(mindspeed.build_arguments(IN_FP8))
    assert sys.modules["mindspeed.megatron_adaptor"].said == [
        "--use-fused-rmsnorm", "--transformer-impl", "transformer_engine", "--fp8-recipe", "blockwise",
        "--fp8-format", "e4m3", "--fp8", "e4m3",
    ]  # fmt: skip
    assert sys.argv == ["rank", "--job", "a file"]
    assert root.handlers == [handler] and root.level == logging.INFO


def test_what_has_to_stay_ours_is_taken_back_and_ours_put_there(package):
    mindspeed._patch_megatron(mindspeed.build_arguments(THROUGH))
    assert sys.modules["mindspeed.patch_utils"].taken_back == list(RESTORED_FUNCTIONS)
    assert package == [FACADE_TARGETS_WITH_MINDSPEED] and set(FACADE_TARGETS_WITH_MINDSPEED) < set(
        REPLACEMENT_REASON_BY_TORCH_NAME
    )


def test_megatron_is_not_imported_before_it(package, monkeypatch, messages):
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    with pytest.raises(EnvironmentUnfit, match=r"megatron\.core") as error:
        mindspeed._patch_megatron([])
    messages(error.value)
    assert "mindspeed.megatron_adaptor" not in sys.modules and not package


def test_a_mindspeed_that_cannot_be_imported_is_one_sentence_with_the_reason(package, tmp_path, messages):
    (tmp_path / "mindspeed/megatron_adaptor.py").write_text("import scipy_of_nobody")
    before = list(sys.argv)
    with pytest.raises(EnvironmentUnfit, match="MindSpeed") as refused:
        mindspeed._patch_megatron([])
    messages(refused.value)
    assert "scipy_of_nobody" in str(refused.value) and sys.argv == before


def standing(monkeypatch, **functions):
    """A module whose functions are patched by us."""
    monkeypatch.setitem(sys.modules, "upstream", SimpleNamespace(**functions))
    monkeypatch.setattr(
        patcher, "list_applied_targets", lambda: tuple(f"upstream:{name}" for name in functions)
    )


def made_by(module: str, **attributes):
    def function():
        """Does nothing."""

    function.__module__ = module
    vars(function).update(attributes)
    return function


def test_a_target_that_it_replaced_has_two_owners_and_one_that_it_wraps_has_not(monkeypatch):
    ours = made_by("bundle.replacements.moe")
    standing(monkeypatch, a=ours, b=made_by("mindspeed.core.b", __wrapped__=ours))
    mindspeed.refuse_overwritten_patches()
    standing(monkeypatch, a=ours, c=made_by("mindspeed.core.c"))
    with pytest.raises(PatchError, match="has replaced these targets") as refused:
        mindspeed.refuse_overwritten_patches()
    assert "upstream:c" in str(refused.value) and "upstream:a" not in str(refused.value)


def test_a_process_is_told_once(monkeypatch, messages):
    monkeypatch.setattr(mindspeed, "_used_arguments", mindspeed.build_arguments(THROUGH))
    with pytest.raises(EnvironmentUnfit, match="another job") as error:
        mindspeed.set_up_runtime(IN_FP8)
    messages(error.value)


def test_the_recipe_of_a_job_says_whether_it_goes_through_it(monkeypatch):
    prepared: list[object] = []
    monkeypatch.setattr(mindspeed, "set_up_runtime", prepared.append)
    monkeypatch.setattr(ascend, "set_up_runtime", lambda: prepared.append("without"))
    monkeypatch.setattr(patcher, "apply", prepared.append)
    backends.set_up_runtime("ascend", THROUGH)
    backends.set_up_runtime("ascend", job(QWEN3))
    backends.set_up_runtime("ascend")
    assert prepared == [THROUGH, "without", "without"]
    plan = PatchPlan(None, None, (), ())
    worker.prepare_runtime(plan, "ascend", THROUGH)
    assert prepared[3:] == [plan, THROUGH]
