"""How far an engine's preference loss is from its formula over transformers' own log-probabilities."""

import copy
import functools
from typing import Any

import torch
import transformers

from bundle.engine import Engine, MicroBatch
from bundle.engine.microbatch import from_packing, from_rows
from bundle.packing.packing import Packing
from bundle.recipe import Recipe, from_mapping
from bundle.training.preferences import PreferenceObjective, with_reference
from bundle.verification.numbers import Bench, Numbers, measure_gap
from tests.engine.experiments import engine, gradients
from tests.engine.oracle import fill, parameters, part
from tests.reference.configs import CONFIGS
from tests.reference.weights import drawn, megatron_layout

BETA, SMOOTHING = 0.7, 0.15
CONFIG = CONFIGS["llama3"]
LENGTH = 24
# (tokens of the prompt, of the better answer, of the worse one); two pairs are a micro-batch.
PAIRS = ((5, 9, 4), (3, 2, 15), (8, 11, 11), (6, 1, 7))
# name -> (parallel sizes, whether packed); all on two ranks but the first two
LAYOUTS: dict[str, tuple[dict[str, Any], bool]] = {
    "rows": ({}, False),
    "packed": ({}, True),
    "dp": ({}, False),
    "dp packed": ({}, True),
    "tp": ({"tp": 2}, False),
    "cp": ({"cp": 2}, False),
    "cp packed": ({"cp": 2}, True),
    "pp": ({"pp": 2}, False),
    "vpp packed": ({"pp": 2, "vpp": 2}, True),
}


def recipe(parallel: dict[str, int], *, packed: bool) -> Recipe:
    return from_mapping(
        {
            "name": "preferring",
            "task": "dpo",
            "dpo": {"beta": BETA, "label_smoothing": SMOOTHING},
            "model": {"config": CONFIG, "dtype": "fp32"},
            "parallel": parallel,
            "data": {
                "source": "jsonl",
                "path": ["none"],
                "tokenizer": "hf:none",
                "sequence_length": 4 * LENGTH if packed else LENGTH,
                "packed": packed,
            },
            "train": {
                "steps": 2,
                "global_batch_size": 2 if packed else 4,
                "micro_batch_size": 1 if packed else 2,
            },
            "optimizer": {"warmup_steps": 0},
        }
    )


@functools.cache
def answers() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens [n + 1], which of the n predictions are the answer's) of every sequence, better ones first."""
    generator = torch.Generator().manual_seed(8)
    found = []
    for prompt, *sizes in PAIRS:
        begin = torch.randint(CONFIG["vocab_size"], (prompt,), generator=generator)
        for size in sizes:
            answer = torch.randint(CONFIG["vocab_size"], (size,), generator=generator)
            learned = torch.tensor([0.0] * (prompt - 1) + [1.0] * size)
            found.append((torch.cat((begin, answer)), learned))
    return found


def _model(seed: int) -> Any:
    settings = transformers.AutoConfig.for_model(**copy.deepcopy(CONFIG))
    made = transformers.AutoModelForCausalLM.from_config(
        settings, dtype=torch.float64, attn_implementation="eager"
    )
    weights = {name: tensor.detach() for name, tensor in drawn(CONFIG, seed).items()}
    assert not made.load_state_dict(weights, strict=False).unexpected_keys
    return made.eval()


def _log_prob(model: Any, tokens: torch.Tensor, learned: torch.Tensor) -> torch.Tensor:
    """Of all learned tokens together."""
    log_p = model(tokens[None]).logits[0, :-1].double().log_softmax(-1)
    return (log_p.gather(-1, tokens[1:, None]).squeeze(-1) * learned).sum()


@functools.cache
def wanted() -> tuple[Numbers, torch.Tensor]:
    """The loss, what is measured and the gradients of all pairs; the reference's log-probabilities."""
    policy, other = _model(1), _model(2)
    with torch.no_grad():
        reference = torch.stack([_log_prob(other, *answer) for answer in answers()])
    ratios = torch.stack([_log_prob(policy, *answer) for answer in answers()]) - reference
    chosen, rejected = BETA * ratios[::2], BETA * ratios[1::2]
    right = torch.sigmoid(chosen - rejected)
    loss = (-(1 - SMOOTHING) * torch.log(right) - SMOOTHING * torch.log(1 - right)).mean()
    loss.backward()
    found = {
        "loss": loss,
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/margins": (chosen - rejected).mean(),
        "rewards/accuracies": (chosen > rejected).double().mean(),
    }
    named = {name: value.grad for name, value in policy.named_parameters() if value.grad is not None}
    return {k: v.detach() for k, v in found.items()} | megatron_layout(CONFIG, named), reference


def micro_batches(of: Engine) -> list[MicroBatch]:
    """Those of this data-parallel rank."""
    groups, job, reference = of.groups, of.recipe, wanted()[1].float()
    made = []
    for first in range(4 * groups.dp.rank, len(answers()), 4 * groups.dp.size):
        of_rank = answers()[first : first + 4]
        ids, labels = ([tokens[cut] for tokens, _ in of_rank] for cut in (slice(-1), slice(1, None)))
        masks = [mask for _, mask in of_rank]
        if job.data.packed:
            packing = Packing.from_lengths(
                [len(one) for one in ids], job.alignment, rank=groups.cp.rank, length=job.data.sequence_length
            )
            fields = (torch.cat(ids), torch.cat(labels), torch.cat(masks))
            batch = from_packing(*fields, packing, mtp_layers=0, mean=job.loss_mean)
        else:
            rows = [
                torch.stack([torch.nn.functional.pad(one, (0, LENGTH - len(one))) for one in field])
                for field in (ids, labels, masks)
            ]
            cp = groups.cp
            batch = from_rows(*rows, cp=cp.size, rank=cp.rank, mtp_layers=0, mean=job.loss_mean)
        made.append(with_reference(batch, reference[first : first + 4]))
    return made


def compare(bench: Bench, layout: str) -> float:
    parallel, packed = LAYOUTS[layout]
    expected = dict(wanted()[0])
    job = recipe(parallel, packed=packed)
    assert job.dpo is not None
    with engine(bench, job, functools.partial(PreferenceObjective, job.dpo)) as made:
        fill(made, megatron_layout(CONFIG, drawn(CONFIG, 1)))
        parts = {each.name: each for each in parameters(made)}
        made.forward_backward(micro_batches(made))
        losses = made.take_losses()
        seen = {"loss": torch.tensor(losses.main).double()}
        seen |= {name: torch.tensor(value).double() for name, value in losses.measures.items()}
        assert losses.measures.keys() == expected.keys() & losses.measures.keys()
        of_weights = {name: gradient.double() for name, (gradient, _) in gradients(made).items()}
        for name in of_weights:
            expected[name] = part(parts[name], expected[name])
        seen |= of_weights
        again = made.evaluate(micro_batches(made))
        assert abs(again.main - losses.main) < 1e-5 and again.measures.keys() == losses.measures.keys()
        return measure_gap(seen, {name: expected[name] for name in seen})


def __getattr__(name: str) -> Any:
    """The measurement of a layout."""
    if name not in LAYOUTS:
        raise AttributeError(name)
    return functools.partial(compare, layout=name)
