"""Gradients and weights after a step: norms, buckets, an optimizer on the host, shared vocabularies."""

import torch

from bundle.mcore import optimization
from bundle.mcore.gpt import compute_cross_entropy
from bundle.verification.numbers import (
    DENSE_HF_CONFIG,
    EXPERTS_CONFIG,
    MLA_CONFIG,
    Bench,
    BenchLayout,
    Numbers,
    find_worst,
    measure_gap,
    sum_token_losses,
)
from bundle.verification.products import BroadcastProductRecorder


def measure_cp_gradient_norm(bench: Bench) -> float:
    """Measure the gradient norm of a per-token loss: the same rows shared by two ranks, and on each rank."""
    return bench.measure_norm_gap(DENSE_HF_CONFIG, cp=2)


def measure_optimizer_norm_against_gradients(bench: Bench) -> float:
    """Measure the gradient norm that the optimizer finds, against that of the gradients themselves."""
    with bench.open_layout() as layout:
        batch = layout.build_two_rows(32)
        numbers = layout.run_backward(layout.build_chunk(DENSE_HF_CONFIG), [batch])
        squares = sum(x.square().sum() for name, x in numbers.items() if name != "loss")
        reference = torch.as_tensor(squares).sqrt() / batch.mask.sum()
        return measure_gap(layout.measure_gradient_norm(DENSE_HF_CONFIG), {"norm": reference})


def measure_shared_embedding_mark_effect(bench: Bench) -> float:
    """Measure a step of a model whose embedding megatron has marked as shared by stages, against one without.

    The buffer before the embedding is an odd multiple of 64 long, as the norm at the end of the last layer
    is.
    """
    with bench.open_layout() as layout:
        return measure_gap(
            _take_step_and_read_weights(layout, shared=True),
            _take_step_and_read_weights(layout, shared=False),
        )


def _take_step_and_read_weights(layout: BenchLayout, *, shared: bool) -> Numbers:
    """Take a step; return the gradient norm and the weights after it."""
    model = layout.build_chunk(DENSE_HF_CONFIG)
    if shared:
        vars(model.get_parameter("embedding.word_embeddings.weight"))["shared_embedding"] = True
    norm = layout.take_step_and_get_norm(DENSE_HF_CONFIG, model)
    return {"norm": norm, **{name: x.detach().clone() for name, x in model.named_parameters()}}


def measure_tp_mla_gradient_norm(bench: Bench) -> float:
    """Measure latent attention over two ranks; every rank holds the down projections whole."""
    return bench.measure_norm_gap(MLA_CONFIG, tp=2)


def measure_tp_ep_gradient_norm(bench: Bench) -> float:
    """Measure half of the experts on each of two tensor-parallel ranks."""
    return bench.measure_norm_gap(EXPERTS_CONFIG, tp=2, ep=2)


def measure_offload_late_weight_load(bench: Bench) -> float:
    """Measure a step on weights loaded after the optimizer was made, against weights loaded before."""
    with bench.open_layout() as layout:
        return measure_gap(
            _read_offloaded_master_weights(layout, loads_after=True),
            _read_offloaded_master_weights(layout, loads_after=False),
        )


def _read_offloaded_master_weights(layout: BenchLayout, *, loads_after: bool) -> Numbers:
    job = layout.build_recipe(DENSE_HF_CONFIG, dtype="bf16")
    model = layout.build_chunk(DENSE_HF_CONFIG, dtype="bf16")
    wrapped = optimization.wrap_data_parallel(job, model.config, [model])

    def load() -> None:
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    if not loads_after:
        load()
    optimizer = optimization.build_optimizer(job, wrapped, **optimization.FULL_CPU_OFFLOAD_OPTIONS)
    if loads_after:
        load()
        optimizer.reload_model_params()
    return {
        str(i): x.detach().float().clone()
        for i, x in enumerate(optimization.list_offload_optimizer_parameters(optimizer))
    }


def measure_offload_adam_state_load(bench: Bench) -> float:
    """Measure the loaded states of an fp32 and a bf16 parameter, and the fp32 weights of both."""
    generator = torch.Generator().manual_seed(12)
    drawn = [torch.randn(5, generator=generator).to(bench.device) for _ in range(6)]
    parameters = [torch.nn.Parameter(drawn[0].clone()), torch.nn.Parameter(drawn[1].bfloat16())]
    optimizer = optimization.build_offloaded_adam(parameters)
    states = {
        number: {
            "step": torch.tensor(3.0),
            "exp_avg": drawn[2 + 2 * number],
            "exp_avg_sq": drawn[3 + 2 * number].square(),
        }
        for number in range(2)
    }
    masters = {0: parameters[0].detach().clone(), 1: drawn[1].clone()}
    loaded_states = {number: {**state, "master_param": masters[number]} for number, state in states.items()}
    optimizer.load_state_dict(
        {"state": loaded_states, "param_groups": optimizer.state_dict()["param_groups"]}
    )
    inner = [optimizer.param_to_inner_param[parameter] for parameter in parameters]
    inner_states = {
        part: state
        for sub_optimizer in optimizer.sub_optimizers
        for part, state in sub_optimizer.state.items()
    }
    seen = {f"{i} {k}": inner_states[part][k] for i, part in enumerate(inner) for k in states[i]}
    expected = {f"{i} {k}": value for i, state in states.items() for k, value in state.items()}
    seen |= {f"{i} weights": part.detach() for i, part in enumerate(inner)}
    expected |= {f"{i} weights": master for i, master in masters.items()}
    # Some of each are on the host, where the optimizer has put them.
    return measure_gap(
        *({name: value.float().cpu() for name, value in numbers.items()} for numbers in (seen, expected))
    )


_LABEL_SMOOTHING = 0.3


def measure_frozen_head_input_gradient(bench: Bench) -> float:
    """Return the error of a frozen output layer's input gradient, or how many products of it repeat a matrix.

    The gradient is that of one row of logits, seen batch first: its size-1 dimension has the row's stride.
    """
    with bench.open_layout() as layout:
        head = layout.build_chunk(DENSE_HF_CONFIG).output_layer
        head.weight.requires_grad_(False)
        rows = torch.randn(16, 1, head.weight.shape[1], device=bench.device, requires_grad=True)
        output, _ = head(rows)
        gradient = torch.randn(1, 16, head.weight.shape[0], device=bench.device).transpose(0, 1)
        with BroadcastProductRecorder() as repeated:
            output.backward(gradient)
        exact = (gradient.double() @ head.weight.double()).float()
        return find_worst([measure_gap({"gradient": rows.grad}, {"gradient": exact}), len(repeated.shapes)])


def measure_label_smoothing(bench: Bench) -> float:
    """Measure the loss and the gradient of smoothed labels, against the formula over all columns."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(6, 2, 10, generator=generator).mul(3).to(bench.device).requires_grad_()
    labels = torch.randint(0, 10, (6, 2), generator=generator).to(bench.device)
    weights = torch.rand(6, 2, generator=generator).to(bench.device)
    target_probabilities = torch.full_like(logits, _LABEL_SMOOTHING / 9).scatter(
        -1, labels[..., None], 1 - _LABEL_SMOOTHING
    )
    loss = -(target_probabilities * logits.log_softmax(-1)).sum(-1)
    (loss * weights).sum().backward()
    with bench.open_layout(tp=2) as layout:
        local_logits = logits.detach().chunk(2, -1)[layout.tp.rank].clone().requires_grad_()
        seen = compute_cross_entropy(local_logits * 1.0, labels, _LABEL_SMOOTHING)
        (seen * weights).sum().backward()
        full_gradient = logits.grad.chunk(2, -1)[layout.tp.rank]  # type: ignore[union-attr]
        return measure_gap(
            {"loss": seen.detach(), "gradient": local_logits.grad},
            {"loss": loss.detach(), "gradient": full_gradient},
        )


def measure_gathered_logits(bench: Bench) -> float:
    """Measure loss and gradients of a model that gathers its logits, against those of one that does not."""
    with bench.open_layout(tp=2) as layout:
        batch = layout.build_two_rows()
        seen = []
        for gather in (True, None):
            # 0.12 gathers nothing where ranks share the sequence
            model = layout.build_chunk(DENSE_HF_CONFIG, {"sequence_parallel": False})
            loss = sum_token_losses(model, batch, runtime_gather_output=gather)
            loss.backward()
            seen.append({"loss": loss.detach(), **layout.collect_cp_summed_gradients(model)})
        return measure_gap(*seen)
