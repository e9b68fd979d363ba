"""The bias that steers which experts are chosen: moved by real tokens alone, and not by a step left out."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Literal
from unittest import mock

import torch
import torch.distributed as dist

from bundle.engine import Engine
from bundle.mcore import routers
from bundle.recipe import from_mapping
from bundle.verification.numbers import Bench, find_worst
from tests.engine.balanced import hear
from tests.engine.experiments import MODELS, UNEVEN, engine, micro_batches, recipe
from tests.engine.reference import texts

RATE = 0.25
CONFIG = MODELS["balanced"]


def moved(bench: Bench) -> float:
    """How far the biases after a step are from those of single sequences, in packs and in padded rows."""
    with bench.open_layout() as groups:
        model = groups.build_chunk(CONFIG)
        heard = hear(model)
        for text in texts(UNEVEN):
            positions = torch.arange(len(text.mask))[None]
            model(text.tokens[None, :-1], positions, None)
    wanted = torch.stack([_moves(torch.cat(logits)) for logits in heard])
    gaps = []
    for layout in ("", "tp", "cp", "ep"):
        for form in ("thd", "bshd"):
            with _engine(bench, layout) as made:
                made.forward_backward(micro_batches(made, texts(UNEVEN), form, "token"))
                gaps.append((_biases(made) - wanted).abs().max().item())
    return find_worst(gaps)


def left_out(bench: Bench) -> float:
    """How far the biases move in a step that is skipped; infinite if the next one does not move them."""
    with _engine(bench, "", on_nan="skip") as made:
        good = micro_batches(made, texts(UNEVEN), "thd", "token")
        before = _biases(made)
        made.forward_backward([replace(one, loss_mask=one.loss_mask / 0) for one in good])
        assert not made.step_optimizer().updated
        moved = (_biases(made) - before).abs().max().item()
        made.forward_backward(good)
        assert made.step_optimizer().updated
        return float(moved) if not torch.equal(_biases(made), before) else float("inf")


def exchanges(bench: Bench) -> float:
    """Infinite if ranks exchange more than they must for the weights of a step's means, or biases stay."""
    seen, exchange = [], dist.all_reduce
    for balanced, mean in ((False, "token"), (True, "token"), (False, "sequence"), (True, "sequence")):
        with _engine(bench, "", balanced=balanced) as made:
            (batch,), before = micro_batches(made, texts(UNEVEN), "thd", mean), _biases(made)
            with mock.patch.object(dist, "all_reduce", wraps=exchange) as asked:
                made.models[0].register_forward_pre_hook(lambda *_, of=asked: seen.append(of.call_count))
                made.forward_backward([batch])
            assert not torch.equal(_biases(made), before)
    return 0.0 if seen == [0, 1, 1, 1] else float("inf")


def _engine(
    bench: Bench, layout: str, on_nan: Literal["stop", "skip"] = "stop", *, balanced: bool = True
) -> AbstractContextManager[Engine]:
    config = CONFIG if balanced else CONFIG | {"aux_loss_alpha": 0.0}
    job = recipe(config, dict.fromkeys(layout.split(), 2), packed=True)
    values = job.dump()
    values["model"]["moe"]["bias_update_rate"] = RATE
    values["train"]["on_nan"] = on_nan
    if not balanced:
        values["model"]["moe"]["z_loss_coeff"] = 0.0
    return engine(bench, from_mapping(values))


def _biases(of: Engine) -> torch.Tensor:
    return torch.stack([router.expert_bias.clone() for router in routers.find_routers(of.models[0])])


def _moves(logits: torch.Tensor) -> torch.Tensor:
    """From 0: up where an expert is chosen less often than the average, down where more often."""
    chosen = logits.topk(2).indices
    counts = torch.stack([(chosen == i).sum() for i in range(logits.shape[1])]).double()
    return RATE * (counts.mean() - counts).sign().float()
