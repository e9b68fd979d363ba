"""What is read in a tree decides, and a number only where there is no tree; each says which."""

from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from bundle import capabilities
from bundle.environment.hardware import build_preset
from bundle.environment.packages import MegatronCode, SourcePredicate
from bundle.errors import UsageError
from bundle.planning import activations, build_plan, memory, problems
from bundle.recipe import Recipe, load
from tests.planning.jobs import DEEPSEEK, QWEN3, QWEN3_NEXT, job
from tests.reference.configs import CONFIGS

SIGNS = [
    sign
    for room in (activations, memory, problems)
    for sign in vars(room).values()
    if isinstance(sign, SourcePredicate)
]
GPT_OSS = CONFIGS["gpt_oss"] | {"vocab_size": 258}
KEY = "model.recompute.modules: megatron-core"


@pytest.mark.parametrize("sign", SIGNS, ids=lambda sign: sign.text)
def test_releases_show_a_sign_from_the_one_that_it_came_with(sign: SourcePredicate, release_trees) -> None:
    for number, root in release_trees.items():
        version = Version(number)
        assert MegatronCode(version, root).has(sign) == MegatronCode(version).has(sign), number


def test_a_tree_is_believed_before_its_number(tmp_path: Path, messages) -> None:
    sign = problems.SHARED_EXPERTS_RECOMPUTATION_EVIDENCE
    file = tmp_path / "megatron/core" / sign.file
    file.parent.mkdir(parents=True)
    file.write_text(f"allowed = {{{sign.text}}}")
    backported, number = MegatronCode(Version("0.12.3"), tmp_path), MegatronCode(Version("0.12.3"))
    assert (backported.has(sign), number.has(sign)) == (True, False)
    for code, source in ((backported, sign.file), (number, "0.12.3")):
        assert source in code.describe_evidence_source(sign)
        messages(code.describe_evidence_source(sign))
    file.write_text("")
    assert not MegatronCode(Version("0.19.2"), tmp_path).has(sign)


def test_gpt_oss_needs_a_release_with_sinks(release_trees: dict[str, Path]) -> None:
    recipe = job(GPT_OSS)
    for number, root in release_trees.items():
        made = build_plan(recipe, backend="cpu", mcore=str(root))
        refused = [problem.text for problem in made.problems if "sinks" in problem.text]
        assert bool(refused) == (Version(number) < Version("0.15")), number


def lay_out(layout: str) -> Recipe:
    sizes = {"pp": layout.count("|") + 1, "pipeline_model_parallel_layout": layout}
    return job(DEEPSEEK | {"num_nextn_predict_layers": layout.count("m")}, parallel=sizes)


@pytest.mark.parametrize(
    ("layout", "since_by_minor"),
    [
        ("Ettt|tL", {"0.12": "0.13"}),
        ("Ettt|tmL", {"0.12": "0.13", "0.13": "0.14"}),
        ("Et|t|tt|mL", {"0.12": "0.13", "0.13": "0.14", "0.14": "0.16", "0.15": "0.16"}),
        ("E|ttt|tm|L", {"0.12": "0.13", "0.13": "0.14", "0.14": "0.16", "0.15": "0.16"}),
    ],
)
def test_a_layout_string_needs_a_release_that_builds_it(layout, since_by_minor, release_trees) -> None:
    recipe = lay_out(layout)
    for number, root in release_trees.items():
        made = build_plan(recipe, backend="cpu", mcore=str(root))
        said = [one.text for one in made.problems if "pipeline_model_parallel_layout" in one.text]
        since = since_by_minor.get(number.rpartition(".")[0])
        assert len(said) == (since is not None), number
        assert not said or (f"megatron-core {number}" in said[0] and f"Use {since} or newer" in said[0])


@pytest.mark.parametrize("release", ["0.12.3", "0.13.1", "0.15.3"])
def test_a_refusal_of_a_layout_string_says_what_the_release_does_not_build(release, messages) -> None:
    (problem,) = problems.find_layout_string_problems(lay_out("E|ttt|tm|L"), MegatronCode(Version(release)))
    assert release in problem.text
    messages(problem.text)


@pytest.mark.parametrize(
    ("parallel", "unit", "wrong"),
    [
        ({"pp": 2}, 2, []),
        ({"pp": 2, "num_layers_in_first_pipeline_stage": 3}, 3, ["1"]),
        ({"pp": 2, "vpp": 2}, 2, ["1"]),
        ({"pp": 2, "pipeline_model_parallel_layout": "Ettt|tL"}, 2, ["1, 3"]),
        ({"pp": 2, "pipeline_model_parallel_layout": "Ettt|tL"}, 1, []),
    ],
)
def test_units_of_recomputation_fit_into_chunks_to_0_16(parallel, unit, wrong, release_trees) -> None:
    recompute = {"granularity": "full", "layers": unit}
    recipe = job(QWEN3, parallel=parallel, model={"config": QWEN3, "recompute": recompute})
    for number, root in release_trees.items():
        made = build_plan(recipe, backend="cpu", mcore=str(root))
        said = [one.text for one in made.problems if one.text.startswith("model.recompute.layers")]
        early = Version(number) < Version("0.17")
        assert [text.partition("divide the ")[2].partition(" layers")[0] for text in said] == wrong * early


def test_mtp_layers_are_computed_again_one_by_one(release_trees) -> None:
    config = DEEPSEEK | {"num_nextn_predict_layers": 1}
    for method, refused in (("uniform", True), ("block", False)):
        recompute = {"granularity": "full", "method": method, "layers": 2}
        recipe = job(config, model={"config": config, "recompute": recompute})
        for number, root in release_trees.items():
            said = [one.text for one in build_plan(recipe, backend="cpu", mcore=str(root)).problems]
            found = [
                text
                for text in said
                if text.startswith("model.recompute.layers: 2 is not allowed, because MTP")
            ]
            assert bool(found) == (refused and Version(number) >= Version("0.14")), number


@pytest.mark.parametrize("layers", [None, ["full_attention"] * 4], ids=["nets", "their attention alone"])
def test_gated_delta_nets_need_a_release_and_a_backend_that_have_them(
    release_trees: dict[str, Path], layers: list[str] | None
) -> None:
    recipe = job(QWEN3_NEXT | {"layer_types": layers})
    for number, root in release_trees.items():
        made = build_plan(recipe, backend="cpu", mcore=str(root))
        refused = [problem.text for problem in made.problems if "gated delta nets" in problem.text]
        assert bool(refused) == (Version(number) < Version("0.16")), number
    said = build_plan(recipe, backend="cuda", hardware_name="h200", mcore="0.16.1").notes
    assert any("flash-linear-attention" in note for note in said) is (layers is None)
    assert not any("flash-linear-attention" in note for note in build_plan(recipe, backend="cpu").notes)
    for backend, wrong in (("cuda", False), ("ascend", True)):
        reasons = problems.find_backend_problems(
            recipe,
            capabilities.find_capabilities(backend),
            build_preset("h200"),
            MegatronCode(Version("0.16.1")),
        )
        assert any("gated delta nets" in problem.text for problem in reasons) is wrong


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"data": {"packed": True}}, "data.packed"),
        ({"parallel": {"cp": 2}}, "parallel.cp"),
        ({"parallel": {"tp": 4, "sequence_parallel": True}}, "linear_num_key_heads 2"),
        ({"model": {"lora": {"rank": 2, "alpha": 2.0, "targets": ["q_proj"]}}}, "model.lora"),
        ({"model": {"fp8": {"scaling": "blockwise"}}}, "model.fp8"),
        ({"model": {"mtp": {"layers": 1}}}, "model.mtp.layers"),
        ({"checkpoint": {"export": "hf-fp8"}}, "checkpoint.export"),
    ],
)
def test_what_nobody_computes_of_gated_delta_nets_is_refused_by_its_key(
    sections: Any, key: str, messages
) -> None:
    with pytest.raises(UsageError) as caught:
        job(QWEN3_NEXT, **sections)
    assert key in str(caught.value)
    messages(caught.value)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"parallel": {"tp": 2}}, "parallel.etp"),
        ({"checkpoint": {"export": "hf-fp8"}}, "checkpoint.export"),
        ({"model": {"mtp": {"layers": 1}}}, "model.mtp.layers"),
    ],
)
def test_what_nobody_computes_of_gpt_oss_is_refused_by_its_key(sections: Any, key: str, messages) -> None:
    with pytest.raises(UsageError) as caught:
        job(GPT_OSS, **sections)
    assert key in str(caught.value)
    messages(caught.value)


@pytest.mark.parametrize(
    ("backend", "sections", "missing"),
    [
        ("cuda", {}, None),
        ("cuda", {"data": {"packed": True}}, "thd"),
        ("cuda", {"parallel": {"cp": 2}}, "cp"),
        ("cpu", {"data": {"packed": True}, "parallel": {"cp": 2}}, None),
        ("ascend", {}, "bshd"),
    ],
)
def test_kernels_without_sinks_are_named(
    backend: str, sections: dict[str, Any], missing: str | None, messages
) -> None:
    recipe = job(GPT_OSS, **sections)
    found = capabilities.find_capabilities(backend).list_requested_kernel_refusals(recipe, None)
    assert any(f"sinks with {missing}" in why for why in found) if missing else not found
    for reason in found:
        messages(reason)


def test_a_refusal_says_what_decided_it(release_trees: dict[str, Path]) -> None:
    recipe = load("demo", ["model.recompute={granularity: selective, modules: [shared_experts]}"])
    old = next((tree for number, tree in release_trees.items() if Version(number) < Version("0.14")), None)
    assert old is not None, "no release before 0.14 among the trees"
    for mcore, decided in (("0.13.1", "number 0.13.1"), (old, "transformer/")):
        made = build_plan(recipe, backend="cpu", mcore=str(mcore))
        (said,) = [problem.text for problem in made.problems if problem.text.startswith(KEY)]
        assert decided in said


@pytest.mark.parametrize(
    ("scaling", "modules", "allowed"),
    [
        ("delayed", ["layernorm"], None),
        ("delayed", ["moe_act"], None),
        ("blockwise", ["moe_act", "layernorm"], "0.14"),
        ("tensorwise", ["moe_act"], "0.14"),
        ("delayed", ["core_attn"], "0"),
    ],
)
def test_what_is_recomputed_beside_fp8(scaling, modules, allowed, release_trees) -> None:
    recompute = {"granularity": "selective", "modules": modules}
    config = DEEPSEEK | {"moe_intermediate_size": 48}
    recipe = job(config, model={"config": config, "fp8": {"scaling": scaling}, "recompute": recompute})
    for number, root in release_trees.items():
        made = build_plan(recipe, hardware_name="h200", mcore=str(root), per_node=1)
        said = [one.text for one in made.problems if "megatron-core recomputes" in one.text]
        assert bool(said) == (allowed is None or Version(number) < Version(allowed)), number


@pytest.mark.parametrize(
    ("config", "scaling", "refused"),
    [
        (DEEPSEEK, "delayed", ("0.14.0", "0.15.3")),
        (DEEPSEEK, "tensorwise", ()),
        (DEEPSEEK | {"n_shared_experts": 0}, "delayed", ()),
        (QWEN3, "delayed", ()),
    ],
)
def test_delayed_fp8_beside_shared_experts_needs_a_release_without_the_defect(
    config, scaling, refused, release_trees
) -> None:
    recipe = job(config, model={"config": config, "fp8": {"scaling": scaling}})
    for number, root in release_trees.items():
        on_gpus = build_plan(recipe, hardware_name="h200", mcore=str(root), per_node=1)
        said = [one.text for one in on_gpus.problems if "delayed with shared" in one.text]
        assert bool(said) == (number in refused), number


def test_blockwise_fp8_on_gpus_needs_a_release_that_names_it(release_trees) -> None:
    recipe = job(QWEN3, model={"config": QWEN3, "fp8": {"scaling": "blockwise"}})
    for number, root in release_trees.items():
        on_gpus = build_plan(recipe, hardware_name="h200", mcore=str(root), per_node=1)
        said = [one.text for one in on_gpus.problems if "does not support blockwise" in one.text]
        assert bool(said) == (Version(number) < Version("0.13")), number
        assert not build_plan(recipe, backend="cpu", mcore=str(root), per_node=1).problems
