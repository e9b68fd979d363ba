"""What each known trap does to a training step of two ranks, against one process with all of it."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from bundle.engine import Engine
from bundle.engine.microbatch import from_packing, from_rows
from bundle.mcore import filter_keywords, gated_delta, gpt, optimization, routers
from bundle.mcore.groups import get_dp_cp_group
from bundle.packing.packing import Packing
from bundle.recipe import Recipe
from bundle.recipe.alignment import Alignment
from bundle.verification.numbers import (
    DENSE_HF_CONFIG,
    EXPERTS_CONFIG,
    MLA_CONFIG,
    VOCABULARY_SIZE,
    Bench,
    BenchLayout,
    Numbers,
    draw_sequences_with_next_token,
    measure_gap,
    sum_token_losses,
)
from tests.engine.experiments import engine as engine_of

ROWS, LENGTH, STEPS = 8, 32, 2
_ALONE: dict[str, Any] = {}


def experts(bench: Bench, tp: int = 2, etp: int = 1) -> float:
    return _compare(bench, {"config": EXPERTS_CONFIG}, {"tp": tp, "etp": etp})


def experts_cut_alone(bench: Bench) -> float:
    return experts(bench, tp=1, etp=2)


def experts_split_over_tensor_ranks(bench: Bench) -> float:
    """The way out of the trap."""
    return experts(bench, etp=2)


def packed_prediction(bench: Bench) -> float:
    recipe = _recipe({"config": DENSE_HF_CONFIG, "mtp": {"layers": 1}}, {}, packed=True)
    with engine_of(bench, recipe) as engine:
        _step(engine, packed=True)
    return 0.0


def prediction_over_tensor_ranks(bench: Bench) -> float:
    return _compare(bench, {"config": DENSE_HF_CONFIG, "mtp": {"layers": 1}}, {"tp": 2})


def interleaved(bench: Bench, *, batched: bool = True) -> float:
    def exchange(engine: Engine) -> None:
        engine.config.batch_p2p_comm, engine.config.overlap_p2p_comm = batched, not batched

    return _compare(
        bench, {"config": DENSE_HF_CONFIG | {"num_hidden_layers": 4}}, {"pp": 2, "vpp": 2}, exchange
    )


def interleaved_without_batches(bench: Bench) -> float:
    """The way out of the trap."""
    return interleaved(bench, batched=False)


def overlap_detached(bench: Bench) -> float:
    """The last stage's copy of the embedding, which only MTP reads, gets no gradient and is waited for.

    To 0.15; no trap, because ours gets a gradient of zeros.
    """
    detached = {"detach_trunk": True, "detach_embeddings": True}
    return _runs(
        bench,
        {"config": DENSE_HF_CONFIG, "mtp": {"layers": 1, **detached}},
        {"pp": 2},
        overlap_grad_reduce=True,
    )


def overlap_tied(bench: Bench) -> float:
    """With the weight of the head that megatron allocates."""
    model = {"config": DENSE_HF_CONFIG | {"tie_word_embeddings": True}, "mtp": {"layers": 1}}
    with mock.patch.object(gpt, "tie_head_to_mtp_embedding"):
        return _runs(bench, model, {"pp": 2}, overlap_grad_reduce=True)


def saved_tied(bench: Bench) -> float:
    """0.0 if the weights with the head that megatron allocates can be saved."""
    model = {"config": DENSE_HF_CONFIG | {"tie_word_embeddings": True}, "mtp": {"layers": 1}}
    with mock.patch.object(gpt, "tie_head_to_mtp_embedding"):
        return _saves(bench, model)


def saved_tied_without_the_head(bench: Bench) -> float:
    """What our own jobs do."""
    return _saves(bench, {"config": DENSE_HF_CONFIG | {"tie_word_embeddings": True}, "mtp": {"layers": 1}})


def overlap_tied_without_the_head(bench: Bench) -> float:
    """What our own jobs do."""
    model = {"config": DENSE_HF_CONFIG | {"tie_word_embeddings": True}, "mtp": {"layers": 1}}
    return _compare(bench, model, {"pp": 2}, overlap_grad_reduce=True)


def overlap_in_buckets(bench: Bench) -> float:
    """A shared embedding behind buckets of any fill; no trap, because a patch of 0.12 pads in between."""
    model = {"config": DENSE_HF_CONFIG | {"tie_word_embeddings": True}}
    return _compare(bench, model, {"pp": 2}, overlap_grad_reduce=True, bucket_size=10000)


def latent_attention_without_sequence_parallelism(bench: Bench) -> float:
    """The gradient norm of two tensor-parallel ranks with the whole sequence each."""
    return bench.measure_norm_gap(MLA_CONFIG, {"sequence_parallel": False}, tp=2)


def packed_gated_delta(bench: Bench) -> float:
    """0.0 if a pack is not refused; no such layer before 0.16 refuses any.

    Where it is taken, the layer asks for a kernel of flash-linear-attention that torch alone has not.
    """
    with bench.open_layout() as groups:
        config = groups.build_chunk(DENSE_HF_CONFIG).config
        pack = groups.pack_padded_sequences(draw_sequences_with_next_token((6, 10)), multiple=1).packed
        try:
            layer = gated_delta.build_small_delta_net(config)
        except ImportError:
            return 0.0
        try:
            layer(torch.randn(16, 1, config.hidden_size), None, packed_seq_params=pack)
        except AssertionError as taken:
            if "deterministic mode" not in str(taken):
                raise
    return 0.0


def prediction_with_two_outputs(bench: Bench) -> float:
    """How far two context-parallel ranks' gradient norm of an MTP loss is from one's, under a mean of losses.

    NVIDIA/Megatron-LM#3943 (and #3959, closed) misses a factor of the ranks there where the loss function
    returns two values. There is none to be missed: the loss of each rank is a mean, and ranks are averaged.
    """
    options = {"calculate_per_token_loss": False, "mtp_loss_scaling_factor": 100.0}  # next to nothing else
    norms = []
    for sizes in (_ALONE, {"cp": 2}):
        with bench.open_layout(**sizes) as groups:
            job = groups.build_recipe(DENSE_HF_CONFIG, mtp={"layers": 1})
            model = groups.build_chunk(DENSE_HF_CONFIG, options, mtp={"layers": 1})
            wrapped = optimization.wrap_data_parallel(job, model.config, [model])
            batch = groups.build_two_rows(32)

            def step(batches: Any, part: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
                return sum_token_losses(part, next(batches)) / 64, lambda loss: (loss, {})

            optimization.forward_backward(
                step, [batch, batch], wrapped, sequence_length=32, micro_batch_size=2
            )
            norms.append({"norm": torch.tensor(optimization.build_optimizer(job, wrapped).step()[1])})
    return measure_gap(norms[1], norms[0])


def balancing_of_prompts(bench: Bench) -> float:
    """The gradients of the balancing loss where a quarter of the tokens is learned, against all of them."""
    learned = torch.ones(2, 32)
    with bench.open_layout() as groups:
        whole = _balancing(groups, learned)
        learned[:, 8:] = 0.0
        return measure_gap(_balancing(groups, learned), whole)


def _balancing(groups: BenchLayout, learned: torch.Tensor) -> Numbers:
    """The routers' gradients after a step of the schedule: with the balancing loss, less those without."""
    found = []
    for coefficient in (2.0, 0.0):
        options = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": coefficient}
        model = groups.build_chunk(EXPERTS_CONFIG, options)
        wrapped = optimization.wrap_data_parallel(groups.build_recipe(EXPERTS_CONFIG), model.config, [model])
        batch = groups.build_batch(torch.stack(draw_sequences_with_next_token((32, 32))), learned)

        def step(batches: Any, part: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
            batch = next(batches)
            loss = sum_token_losses(part, batch)
            return loss, lambda _: (loss, batch.mask.sum().int(), {})

        optimization.forward_backward(step, [batch], wrapped, sequence_length=32, micro_batch_size=2)
        found.append(torch.stack([router.weight.main_grad.clone() for router in routers.find_routers(model)]))
    return {"routers": found[0] - found[1]}


def balancing_of_packs(bench: Bench) -> float:
    """The gradient of the balancing loss over two sequences in one row, against two rows of one."""
    rows = _hidden(bench)
    with bench.open_layout() as groups:
        packed = _router_gradient(groups, "seq_aux_loss", rows[:, None])
        return measure_gap(
            packed,
            _router_gradient(groups, "seq_aux_loss", rows.view(2, 12, -1).transpose(0, 1).contiguous()),
        )


def balancing_of_padding(bench: Bench) -> float:
    """The gradient of the balancing loss with 24 rows of padding, told where it can be, against none."""
    rows = _hidden(bench)
    filled = torch.cat([rows, rows[:1].expand_as(rows)])
    padding = torch.arange(48, device=bench.device)[:, None] >= 24
    with bench.open_layout() as groups:
        alone = _router_gradient(groups, "aux_loss", rows[:, None])
        return measure_gap(_router_gradient(groups, "aux_loss", filled[:, None], padding_mask=padding), alone)


def _router_gradient(groups: BenchLayout, kind: str, hidden: torch.Tensor, **how: Any) -> Numbers:
    """What a balancing loss, taken as a mean, gives the weight of a router of hidden states [s, b, h]."""
    options = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": 2.0}
    model = groups.build_chunk(EXPERTS_CONFIG, options | {"calculate_per_token_loss": False})
    router = routers.find_routers(model)[0]
    router(hidden, **filter_keywords(router.forward, **how))[0].sum().mul(0.0).backward()
    return {"weight": router.weight.grad}


def _hidden(bench: Bench) -> torch.Tensor:
    return torch.randn(24, EXPERTS_CONFIG["hidden_size"], generator=torch.Generator().manual_seed(7)).to(
        bench.device
    )


def _compare(
    bench: Bench,
    model: dict[str, Any],
    parallel: dict[str, int],
    tweak: Callable[[Engine], None] = lambda _: None,
    **distributed: Any,
) -> float:
    """How far the losses and gradient norms of a layout are from those of one process."""
    seen = []
    for sizes, options in ((_ALONE, _ALONE), (parallel, distributed)):
        with engine_of(bench, _recipe(model, sizes, **options)) as engine:
            if sizes:
                tweak(engine)
            seen.append(_stack([_step(engine) for _ in range(STEPS)]))
    return measure_gap(seen[1], seen[0])


def _runs(bench, model, parallel, **distributed) -> float:
    """0.0 if training steps end at all."""
    with engine_of(bench, _recipe(model, parallel, **distributed)) as engine:
        _step(engine)
    return 0.0


def _saves(bench, model) -> float:
    """0.0 if what is saved of the weights of two stages can be named at all."""
    with engine_of(bench, _recipe(model, {"pp": 2})) as engine:
        for chunk in engine.models:
            chunk.sharded_state_dict(metadata={"dp_cp_group": get_dp_cp_group()})
    return 0.0


def _recipe(
    model: dict[str, Any], parallel: dict[str, int], *, packed: bool = False, **distributed
) -> Recipe:
    # Without the rules, which refuse what some traps need.
    return Recipe.model_validate(
        {
            "name": "trap",
            "model": {"dtype": "fp32", **model},
            "parallel": parallel,
            "data": {
                "source": "text",
                "path": ["none"],
                "tokenizer": "hf:none",
                "sequence_length": LENGTH,
                "packed": packed,
            },
            "train": {"steps": STEPS, "micro_batch_size": 1 if packed else 2, "global_batch_size": ROWS},
            "optimizer": {"lr": 1e-2, "warmup_steps": 0},
            "distributed": distributed,
        },
    )


def _step(engine: Engine, packed: bool = False) -> tuple[float, float]:
    """(loss, gradient norm) of a step over the same tokens on every data-parallel rank."""
    tokens = torch.randint(0, VOCABULARY_SIZE, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(7))
    layers = engine.recipe.architecture.mtp_layers
    if packed:
        packing = Packing.from_lengths([LENGTH, LENGTH], Alignment())
        flat = tokens[:2, :-1].flatten(), tokens[:2, 1:].flatten()
        micro_batches = [from_packing(*flat, torch.ones(2 * LENGTH), packing, mtp_layers=layers)]
    else:
        micro_batches = [
            from_rows(x[:, :-1], x[:, 1:], torch.ones(2, LENGTH), cp=1, rank=0, mtp_layers=layers)
            for x in tokens.split(2)
        ]
    engine.forward_backward(micro_batches)
    norm = engine.step_optimizer().grad_norm
    return engine.take_losses().main, norm


def _stack(steps: list[tuple[float, float]]) -> Numbers:
    losses, norms = zip(*steps, strict=True)
    return {"losses": torch.tensor(losses), "norms": torch.tensor(norms)}
