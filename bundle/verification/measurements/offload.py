"""The optimizer on the host when weights or states are loaded."""

import torch

from bundle.mcore import optimization
from bundle.mcore.groups import Groups
from bundle.verification.bench import Bench
from bundle.verification.numbers import Numbers, gap
from bundle.verification.tiny import DENSE, chunk, recipe


def loaded_weights(bench: Bench) -> float:
    """What is stepped after weights were loaded, against an optimizer that is made when they are there."""
    with bench.layout() as groups:
        return gap(_stepped(bench, groups, after=True), _stepped(bench, groups, after=False))


def _stepped(bench: Bench, groups: Groups, *, after: bool) -> Numbers:
    job = recipe(DENSE, groups, dtype="bf16")
    model = chunk(bench, groups, DENSE, dtype="bf16")
    wrapped = optimization.data_parallel(job, model.config, [model])

    def load() -> None:
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    if not after:
        load()
    optimizer = optimization.optimizer(job, wrapped, **optimization.OFFLOADED)
    if after:
        load()
        optimizer.reload_model_params()
    return {str(i): x.detach().float().clone() for i, x in enumerate(optimization.stepped(optimizer))}


def loaded_state(bench: Bench) -> float:
    """The states of a parameter in fp32 and of one in bf16, as loaded, and the latter's fp32 weights."""
    generator = torch.Generator().manual_seed(12)
    drawn = [torch.randn(5, generator=generator).to(bench.device) for _ in range(6)]
    parameters = [torch.nn.Parameter(drawn[0].clone()), torch.nn.Parameter(drawn[1].bfloat16())]
    optimizer = optimization.hybrid(parameters)
    states = {
        number: {
            "step": torch.tensor(3.0),
            "exp_avg": drawn[2 + 2 * number],
            "exp_avg_sq": drawn[3 + 2 * number].square(),
        }
        for number in range(2)
    }
    masters = {0: parameters[0].detach().clone(), 1: drawn[1].clone()}
    given = {number: {**state, "master_param": masters[number]} for number, state in states.items()}
    optimizer.load_state_dict({"state": given, "param_groups": optimizer.state_dict()["param_groups"]})
    inner = [optimizer.param_to_inner_param[parameter] for parameter in parameters]
    kept = {part: state for each in optimizer.sub_optimizers for part, state in each.state.items()}
    seen = {f"{i} {k}": kept[part][k].float() for i, part in enumerate(inner) for k in states[i]}
    wanted = {f"{i} {k}": value.float() for i, state in states.items() for k, value in state.items()}
    weights = {f"{i} weights": part.detach().float() for i, part in enumerate(inner)}
    return gap(seen | weights, wanted | {f"{i} weights": masters[i] for i in masters})
