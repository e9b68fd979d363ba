"""A sync takes published tensors as transformers itself saves them: all of them or none."""

import re

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from bundle.architectures import from_config
from bundle.errors import JobFailed, UsageError
from bundle.rollouts import Request, Rollout, Sampling
from bundle.rollouts.transformers import TransformersRollout
from tests.rollouts.families import CONFIGS, draw_model, publish
from tests.vision.cases import CASES as VISION_CASES

SAMPLING = Sampling(temperature=1.0, max_completion_length=5, stop=(), seed=1, step=1)
REQUESTS = [Request((1, 2, 3), 0, 0), Request((4, 5), 1, 0)]


def rollout(name: str, **changes) -> TransformersRollout:
    architecture = from_config(CONFIGS[name])
    given = {"dtype": torch.float32, "device": torch.device("cpu")} | changes
    return TransformersRollout(CONFIGS[name], architecture, **given)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """name, seed -> the model of transformers and what it saves; each once."""
    cache = {}

    def find(name: str, seed: int = 0):
        if (name, seed) not in cache:
            model = draw_model(name, seed)
            cache[name, seed] = model, publish(model, tmp_path_factory.mktemp("model"))
        return cache[name, seed]

    return find


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def is_same(first, second) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "window"])  # which we do not train
def test_a_sync_gives_every_weight_bit_for_bit_and_copies_them(name, published):
    engine = rollout(name)
    promised: Rollout = engine
    assert promised.version is None
    for version in (3, 5, 6, 8):
        model, tensors = published(name, version)
        sent = {key: value.clone() for key, value in tensors.items()}
        generator = torch.get_rng_state()
        engine.sync(version, iter(sent.items()))
        assert torch.equal(generator, torch.get_rng_state()), "the trainer's random state is not touched"
        assert engine.version == version
        assert is_same(state(engine.synced_model), state(model))
        assert not engine.synced_model.training
        assert not any(parameter.requires_grad for parameter in engine.synced_model.parameters())
        for value in sent.values():
            value.fill_(torch.nan)  # the trainer goes on
        assert is_same(state(engine.synced_model), state(model))
        row = torch.tensor([[1, 2, 3, 4, 5, 6]])
        assert torch.equal(engine.synced_model(row).logits, model(row).logits)
        assert {*engine.generate(REQUESTS, SAMPLING)[0].versions.tolist()} == {version}


@pytest.mark.parametrize("name", ["tied", "latent"])
def test_an_error_after_any_tensor_leaves_the_old_version_and_the_next_sync_heals(name, published):
    (_, old), (new_model, new) = published(name), published(name, 1)
    engine = rollout(name)
    engine.sync(1, old.items())
    before, weights = engine.generate(REQUESTS, SAMPLING), state(engine.synced_model)

    def broken(count):
        yield from list(new.items())[:count]
        raise ConnectionError("lost")

    for count in range(len(new) + 1):
        with pytest.raises(ConnectionError):
            engine.sync(2, broken(count))
        assert engine.version == 1 and is_same(state(engine.synced_model), weights)
        if count < len(new):
            with pytest.raises(JobFailed):
                engine.sync(2, list(new.items())[:count])
            assert engine.version == 1 and is_same(state(engine.synced_model), weights)
    for answer, again in zip(before, engine.generate(REQUESTS, SAMPLING), strict=True):
        assert answer.ids == again.ids and (answer.log_probs == again.log_probs).all()
        assert answer.versions.tolist() == again.versions.tolist() == [1] * 5
    engine.sync(2, new.items())
    assert engine.version == 2 and is_same(state(engine.synced_model), state(new_model))
    assert engine.generate(REQUESTS, SAMPLING)[0].versions.tolist() == [2] * 5


@pytest.mark.parametrize(
    ("name", "method"), [("latent", "from_pretrained"), ("mimo", "load_state_dict"), ("mimo", "to")]
)
def test_an_error_inside_transformers_leaves_the_old_version(name, method, published, monkeypatch):
    (_, old), (model, new) = published(name), published(name, 1)
    engine = rollout(name)
    engine.sync(0, new.items())
    engine.sync(1, old.items())
    weights = state(engine.synced_model)
    with monkeypatch.context() as patch:

        def fail(*_, **__):
            raise MemoryError("no room")

        patch.setattr(type(model), method, fail)
        with pytest.raises(MemoryError):
            engine.sync(2, new.items())
    assert engine.version == 1 and is_same(state(engine.synced_model), weights)
    engine.sync(3, new.items())
    assert engine.version == 3 and is_same(state(engine.synced_model), state(model))


@pytest.mark.parametrize("name", ["mimo", "tied"])
def test_two_models_take_turns_and_the_one_that_waits_holds_no_values(name, published):
    engine, models = rollout(name), []
    for version in range(4):
        engine.sync(version, published(name, version % 2)[1].items())
        models.append(engine.synced_model)
    assert models[0] is models[2] and models[1] is models[3] and models[0] is not models[1]
    assert {parameter.device.type for parameter in models[0].parameters()} == {"meta"}
    assert {parameter.device.type for parameter in models[1].parameters()} == {"cpu"}


def test_what_does_not_fit_is_named_all_at_once(published, messages):
    _, tensors = published("mimo")
    engine = rollout("mimo")
    wrong, stranger = dict(tensors), "model.layers.7.self_attn.q_proj.weight"
    del wrong["model.norm.weight"]
    wrong[stranger] = torch.zeros(2)
    wrong["lm_head.weight"] = torch.zeros(38, 32)  # a row of padding
    with pytest.raises(JobFailed) as error:
        engine.sync(1, wrong.items())
    messages(str(error.value))
    assert [line.split()[:2] for line in error.value.violations] == [
        ["missing:", "model.norm.weight"],
        ["unexpected:", stranger],
        ["shape:", "lm_head.weight"],
    ]
    with pytest.raises(JobFailed) as error:
        engine.sync(1, [*tensors.items(), ("lm_head.weight", tensors["lm_head.weight"])])
    messages(str(error.value))
    assert [line.split() for line in error.value.violations] == [["repeated:", "lm_head.weight"]]
    with pytest.raises(JobFailed, match="no weights"):
        engine.generate(REQUESTS, SAMPLING)
    assert engine.version is None


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("mimo", "model.mtp_layers.0."), ("latent", "model.layers.2."), ("glm", "model.layers.2.")],
)
def test_tensors_of_mtp_layers_are_listed_and_of_no_other_layer(name, prefix, published):
    model, tensors = published(name)
    engine = rollout(name)
    mtp = {
        f"{prefix}{suffix}": torch.zeros(3)
        for suffix in (
            ("token_layernorm.weight", "mlp.up_proj.weight")
            if name == "mimo"
            else (
                "enorm.weight",
                "mlp.experts.5.up_proj.weight",
                "embed_tokens.weight",
                "shared_head.head.weight",
            )
        )
    }
    engine.sync(1, {**mtp, **tensors}.items())
    assert engine.ignored_names == tuple(mtp)
    assert is_same(state(engine.synced_model), state(model))
    with pytest.raises(JobFailed) as error:
        engine.sync(2, {**tensors, f"{prefix}other.weight": torch.zeros(3)}.items())
    assert error.value.violations == (f"unexpected: {prefix}other.weight",)


def test_a_layer_that_transformers_would_pass_over_is_refused(published):
    _, tensors = published("glm")
    engine, name = rollout("glm"), "model.layers.46.mlp.up_proj.weight"  # the MTP layer of GLM-4.5-Air
    with pytest.raises(JobFailed) as error:
        engine.sync(1, {**tensors, name: torch.zeros(3)}.items())
    assert error.value.violations == (f"unexpected: {name}",)


def test_a_tied_head_may_come_as_a_copy(published):
    model, tensors = published("tied")
    engine = rollout("tied")
    engine.sync(1, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}.items())
    assert engine.ignored_names == ()
    assert engine.synced_model.lm_head.weight is engine.synced_model.model.embed_tokens.weight
    assert is_same(state(engine.synced_model), state(model))


def test_bfloat16_keeps_what_transformers_keeps_in_fp32(published):
    _, tensors = published("latent")
    engine = rollout("latent", dtype=torch.bfloat16)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    sent = {name: value if name == bias else value.bfloat16() for name, value in tensors.items()}
    engine.sync(1, sent.items())
    found = state(engine.synced_model)
    assert torch.equal(found[bias], tensors[bias]) and found[bias].dtype == torch.float32
    assert torch.equal(found["lm_head.weight"], tensors["lm_head.weight"].bfloat16())
    answers = engine.generate(REQUESTS, SAMPLING)
    assert all(np.isfinite(answer.log_probs).all() for answer in answers)


@pytest.mark.parametrize("name", ["mimo", "tied"])
def test_every_sync_casts_to_the_type_of_the_engine(name, published):
    engine = rollout(name, dtype=torch.bfloat16)
    for seed in (0, 1):
        _, tensors = published(name, seed)
        engine.sync(seed, tensors.items())
        weights = state(engine.synced_model)
        assert all(torch.equal(weights[key], tensors[key].bfloat16()) for key in tensors)
        assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


def test_a_closed_engine_answers_again_after_a_sync(published):
    _, tensors = published("tied")
    engine = rollout("tied")
    engine.sync(5, tensors.items())
    engine.close()
    assert engine.version is None
    with pytest.raises(JobFailed):
        engine.generate(REQUESTS, SAMPLING)
    engine.sync(6, tensors.items())
    assert engine.generate([], SAMPLING) == []
    assert len(engine.generate(REQUESTS, SAMPLING)) == 2


def test_prompts_that_the_model_cannot_read_are_refused(published, messages):
    _, tensors = published("tied")
    engine = rollout("tied")
    engine.sync(1, tensors.items())
    with pytest.raises(UsageError) as error:
        engine.generate(
            [*REQUESTS, Request((), 8, 0), Request((), 8, 1), Request((1, 37), 9, 0), Request((-1,), 10, 0)],
            SAMPLING,
        )
    messages(str(error.value))
    numbers = [[int(n) for n in re.findall(r"-?\d+", line)] for line in error.value.violations]
    assert numbers == [[8], [9, 37, 37], [10, -1, 37]]


def test_families_without_a_text_model_and_bad_limits_are_refused():
    config = next(case.config for case in VISION_CASES)
    with pytest.raises(UsageError, match="text model"):
        TransformersRollout(config, from_config(config), dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(UsageError, match="batch_limit: 0"):
        rollout("tied", batch_limit=0)
