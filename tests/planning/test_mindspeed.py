"""Jobs through MindSpeed, planned: what is said of it, and what is against it."""

from pathlib import Path

import pytest
from packaging.version import Version

from bundle import capabilities
from bundle.environment.hardware import build_preset
from bundle.environment.packages import MegatronCode, Package
from bundle.errors import ExitCode
from bundle.fp8 import SCALINGS
from bundle.patches import mindspeed
from bundle.planning import to_text
from bundle.planning.plan import build_plan
from bundle.planning.problems import find_backend_problems, find_mindspeed_problems
from tests.planning.jobs import DEEPSEEK, QWEN3, job

THROUGH = {"backend_options": {"mindspeed": True}}
HEADS = {of.branch: of.commit for of in mindspeed.SUPPORTED_TRAINING_BRANCHES}


class There:
    """What is installed: a MindSpeed at this commit, or none."""

    def __init__(self, commit: str | None, *, installed: bool = True) -> None:
        self.commit, self.installed = commit, installed

    def find_package(self, name: str) -> Package | None:
        if name != "mindspeed" or not self.installed:
            return None
        return Package(name, "0.12.1", self.commit, None)


def problems(recipe, there=None, version="0.15.3", *, backend="ascend", root: Path | None = None):
    code = MegatronCode(Version(version), root)
    can = capabilities.find_capabilities(backend, recipe.features)
    return list(find_mindspeed_problems(recipe, can, code, there))


def texts(*arguments, **options):
    return [problem.text for problem in problems(*arguments, **options)]


def test_the_head_of_its_branch_is_taken_and_nobody_else_is_asked_for_one():
    assert not problems(job(QWEN3, **THROUGH), There(HEADS["core_r0.15.3"]))
    assert not problems(job(QWEN3, **THROUGH))  # a machine that was not looked at
    assert not problems(job(QWEN3), There(None, installed=False), version="0.18.2", backend="cuda")


@pytest.mark.parametrize(
    ("there", "says"),
    [
        (There(None, installed=False), "not installed"),
        (There(HEADS["core_r0.16.0"]), "e4772499f7eb (core_r0.16.0)"),
        (There("0" * 40), "000000000000"),
        (There(None), "unknown commit"),
    ],
)
def test_another_mindspeed_is_none_for_this_megatron(there, says, messages):
    (problem,) = problems(job(QWEN3, **THROUGH), there)
    assert problem.code is ExitCode.ENVIRONMENT_UNFIT
    assert says in problem.text and "d0d5809d4323" in problem.text and "core_r0.15.3" in problem.text
    messages(problem.text)


@pytest.mark.parametrize("version", ["0.13.1", "0.18.2"])
def test_a_megatron_without_a_branch_that_was_read_is_refused(version, messages):
    (problem,) = problems(job(QWEN3, **THROUGH), There(HEADS["core_r0.15.3"]), version)
    assert problem.code is ExitCode.ENVIRONMENT_UNFIT
    assert version in problem.text and "core_r0.16.0" in problem.text
    messages(problem.text)


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_other_backends_have_none(backend, messages):
    (problem,) = problems(job(QWEN3, **THROUGH), backend=backend)
    assert problem.code is ExitCode.USAGE
    assert problem.text.startswith("backend_options.mindspeed") and backend in problem.text
    messages(problem.text)


def test_the_branch_for_0_12_wants_megatron_training_beside_the_core(tmp_path, messages):
    (tmp_path / "megatron/core").mkdir(parents=True)
    given = {"there": There(HEADS["26.1.0_core_r0.12.1"]), "version": "0.12.1", "root": tmp_path}
    (text,) = texts(job(QWEN3, **THROUGH), **given)
    assert "megatron.training" in text and "core_v0.12.1" in text
    messages(text)
    (tmp_path / "megatron/training").mkdir()
    assert not texts(job(QWEN3, **THROUGH), **given)


@pytest.mark.parametrize(
    ("config", "sections", "key"),
    [
        (DEEPSEEK, {"model": {"dtype": "fp32"}}, "model.dtype"),
        (QWEN3, {"model": {"lora": {"rank": 4, "alpha": 8.0, "targets": ["q_proj"]}}}, "model.lora"),
        (
            QWEN3,
            {"parallel": {"pp": 2, "pipeline_model_parallel_layout": "Et|tttL"}},
            "parallel.pipeline_model_parallel_layout",
        ),
    ],
)
def test_what_its_layers_do_not_take_is_refused(config, sections, key, messages):
    (text,) = texts(job(config, **sections, **THROUGH))
    assert text.startswith("backend_options.mindspeed") and key in text
    messages(text)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_fp8_is_there_through_it_on_a5_and_nowhere_else(scaling, messages):
    through, plain = (
        job(QWEN3, model={"config": QWEN3, "fp8": {"scaling": scaling}}, **of) for of in (THROUGH, {})
    )
    can = capabilities.find_capabilities("ascend", through.features)
    assert can.explain_fp8_refusal(scaling, "hybrid", "a5") is None
    for generation in ("a1", "a2", "a3", "310"):
        assert "Ascend950" in str(can.explain_fp8_refusal(scaling, "hybrid", generation))
    code = MegatronCode(Version("0.15.3"))
    for recipe, says in ((through, "a3"), (plain, "backend_options.mindspeed")):
        of = capabilities.find_capabilities("ascend", recipe.features)
        (problem,) = find_backend_problems(recipe, of, build_preset("a3"), code)
        assert problem.code is ExitCode.ENVIRONMENT_UNFIT and says in problem.text
        messages(problem.text)


def test_a_plan_says_which_mindspeed_computes_what_and_where_that_was_seen(messages):
    def said(version):
        made = build_plan(job(QWEN3, **THROUGH), hardware_name="a2", mcore=version, per_node=4)
        assert not made.problems
        text = to_text(made, "run", "starts")
        return text, next(note for note in made.notes if note.startswith("MindSpeed "))

    (text, note), (_, with_triton) = said("0.15.3"), said("0.16.1")
    assert "core_r0.15.3 (d0d5809d4323)" in note and note in text and "npu_swiglu" in text
    assert "triton-ascend" in with_triton and "triton" not in note
    messages(note)
    messages(with_triton)
