"""How far an engine's policy loss is from its reference over transformers' own log-probabilities."""

import copy
import functools
from typing import Any

import torch
import transformers

from bundle.engine import Engine, MicroBatch
from bundle.recipe import Recipe, from_mapping
from bundle.rl.objectives import PolicyObjective
from bundle.verification.numbers import DENSE_HF_CONFIG, Bench, Numbers, find_worst, measure_gap
from tests.engine.cells import AGREES_WITH_DOUBLES
from tests.engine.experiments import engine, gradients
from tests.engine.oracle import fill, parameters, part
from tests.reference.configs import CONFIGS
from tests.reference.weights import drawn, megatron_layout
from tests.rl import building
from tests.rl.references import Answer, Case, compute, draw

CONFIG = CONFIGS["llama3"]
LENGTH, PACK = 24, 64
LENGTHS = (9, 23, 5, 12, 14, 17)
CASES = {
    "ppo": Case(
        low=0.2,
        high=0.28,
        dual=1.4,
        entropy=0.1,
        kl=0.3,
        correction="truncate",
        bounds=(0.0, 1.2),
        divisor=100.0,
    ),
    "gspo": Case(
        "gspo",
        0.03,
        0.04,
        mean="sequence",
        correction="mask",
        level="sequence",
        bounds=(0.3, 3.0),
        veto=0.3,
        kl=0.2,
        kl_kind="k3",
    ),
    "cispo": Case("cispo", 0.3, 0.3, correction="mask", level="geometric", bounds=(0.9, 1.1)),
}
# name -> (parallel sizes, packed, how many answers each micro-batch of each data-parallel rank has)
LAYOUTS: dict[str, tuple[dict[str, Any], bool, tuple[tuple[int, ...], ...]]] = {
    "one": ({}, False, ((6,),)),
    "three packed": ({}, True, ((2, 2, 2),)),
    "uneven": ({}, False, ((1, 3, 2),)),
    "dp": ({}, False, ((2, 2), (2,))),
    "dp packed, one rank without answers": ({}, True, ((2, 4), ())),
    "tp": ({"tp": 2, "sequence_parallel": True}, True, ((2, 4),)),
    "cp": ({"cp": 2}, False, ((2, 4),)),
    "cp packed": ({"cp": 2}, True, ((4, 2),)),
    "pp packed": ({"pp": 2}, True, ((2, 2, 2),)),
}

# Measured together, since each order imports transformers: name -> (ranks, layouts)
GROUPS: dict[str, tuple[int, tuple[str, ...]]] = {
    "on one": (1, ("one", "three packed", "uneven")),
    "on two": (2, ("dp", "dp packed, one rank without answers", "tp")),
    "cut in two": (2, ("cp", "cp packed", "pp packed")),
}


def recipe(parallel: dict[str, Any], *, packed: bool, config: Any = CONFIG, **model: Any) -> Recipe:
    return from_mapping(
        {
            "name": "policy",
            "model": {"config": config, "dtype": "fp32", **model},
            "parallel": parallel,
            "data": {
                "source": "text",
                "path": ["none"],
                "tokenizer": "hf:none",
                "sequence_length": PACK if packed else LENGTH,
                "packed": packed,
            },
            "train": {"steps": 2, "global_batch_size": 8},
            "optimizer": {"warmup_steps": 0},
        }
    )


@functools.cache
def wanted(name: str) -> tuple[Numbers, list[Answer]]:
    """Loss, measures and gradients in float64; and the answers, whose policies are near the model's."""
    settings = transformers.AutoConfig.for_model(**copy.deepcopy(CONFIG))
    model = transformers.AutoModelForCausalLM.from_config(
        settings, dtype=torch.float64, attn_implementation="eager"
    )
    weights = {key: tensor.detach() for key, tensor in drawn(CONFIG, 1).items()}
    assert not model.load_state_dict(weights, strict=False).unexpected_keys
    model.eval()
    answers = draw(LENGTHS, seed=3, vocabulary=CONFIG["vocab_size"])
    for one in answers:
        log_p = model(one.tokens[None, :-1]).logits[0].double().log_softmax(-1)
        noise = {field: getattr(one, field) - one.log_probs for field in ("old", "rollout", "reference")}
        one.log_probs = log_p.gather(-1, one.tokens[1:, None])[:, 0]
        one.entropy = -(log_p.exp() * log_p).sum(-1)
        for field, distance in noise.items():
            setattr(one, field, (one.log_probs.detach() + distance).float())
    loss, measures = compute(CASES[name], answers)
    loss.backward()
    # What is reported as the loss is a mean over tokens, whatever the divisor is.
    case, count = CASES[name], sum(int(one.learned.sum()) for one in answers)
    found = {"loss": loss.detach() * (1 if case.divisor is None else case.divisor / count)}
    found |= {key: torch.tensor(value).double() for key, value in measures.items()}
    named = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    for one in answers:
        one.log_probs, one.entropy = one.log_probs.detach(), one.entropy.detach()
    return found | megatron_layout(CONFIG, named), answers


def micro_batches(of: Engine, answers: list[Answer], cuts: Any, mean: str) -> list[MicroBatch]:
    """Those of this data-parallel rank."""
    groups, job, first, made = of.groups, of.recipe, 0, []
    for rank, sizes in enumerate(cuts):
        for size in sizes:
            if rank == groups.dp.rank:
                length = 2 * PACK if job.data.packed else LENGTH
                depths = job.architecture.mtp_layers
                made.append(
                    building.micro_batch(
                        answers[first : first + size],
                        job.alignment,
                        mean,
                        rank=groups.cp.rank,
                        length=length,
                        mtp_layers=depths,
                    )
                )
            first += size
    return made


def compare(bench: Bench, layout: str) -> float:
    """The largest distance of any case in one layout."""
    parallel, packed, cuts = LAYOUTS[layout]
    gaps = {}
    for name, case in CASES.items():
        if name == "cispo" and layout not in ("one", "cp packed"):
            continue  # what layouts could change of it is what they could of ppo
        expected, answers = dict(wanted(name)[0]), wanted(name)[1]
        policy = building.settings(case)
        with engine(
            bench, recipe(parallel, packed=packed), functools.partial(PolicyObjective, policy)
        ) as made:
            fill(made, megatron_layout(CONFIG, drawn(CONFIG, 1)))
            parts = {each.name: each for each in parameters(made)}
            batches: Any = micro_batches(made, answers, cuts, case.mean)
            mean: Any = case.mean
            made.forward_backward(batches, divisor=case.divisor, mean=mean)
            losses = made.take_losses()
            seen = {"loss": torch.tensor(losses.main).double()}
            seen |= {key: torch.tensor(value).double() for key, value in losses.measures.items()}
            of_weights = {key: gradient.double() for key, (gradient, _) in gradients(made).items()}
            for key in of_weights:
                expected[key] = part(parts[key], expected[key])
            seen |= of_weights
            # k3 of a few tenths: a part of what float32 log-probabilities are off by.
            gaps[name] = measure_gap(seen, {key: expected[key] for key in seen})
            assert losses.measures.keys() <= expected.keys(), losses.measures.keys() - expected.keys()
    return find_worst(gaps.values())


def prediction(bench: Bench) -> float:
    """How far a policy's gradient and loss are from those beside multi-token prediction, in every number."""
    found: list[dict[str, torch.Tensor]] = []
    case, answers = CASES["ppo"], wanted("ppo")[1]
    for layers in (0, 1):
        mtp = {"layers": layers, **({"detach_trunk": True, "detach_embeddings": True} if layers else {})}
        config = DENSE_HF_CONFIG | {"vocab_size": CONFIG["vocab_size"]}
        job = recipe({}, packed=False, config=config, mtp=mtp)
        with engine(bench, job, functools.partial(PolicyObjective, building.settings(case))) as made:
            batches = micro_batches(made, answers, ((4, 2),), case.mean)
            made.forward_backward(batches, divisor=case.divisor)
            losses = made.take_losses()
            assert len(losses.mtp) == layers and all(value > 0 for value in losses.mtp)
            found.append(
                {"loss": torch.tensor(losses.main).double()}
                | {key: gradient.clone() for key, (gradient, _) in gradients(made).items()}
            )
    alone, beside = found
    assert beside.keys() > alone.keys()
    return measure_gap({key: beside[key] for key in alone}, alone)


def compare_all(bench: Bench, names: tuple[str, ...]) -> float:
    """The largest distance of these layouts; an error that names those that are too far."""
    gaps = {name: compare(bench, name) for name in names}
    assert all(value <= AGREES_WITH_DOUBLES for value in gaps.values()), gaps
    return find_worst(gaps.values())


def __getattr__(name: str) -> Any:
    """The measurement of a group of layouts."""
    if name not in GROUPS:
        raise AttributeError(name)
    return functools.partial(compare_all, names=GROUPS[name][1])
