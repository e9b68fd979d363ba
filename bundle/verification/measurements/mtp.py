"""Multi-token prediction, and the embeddings and positions of multimodal models."""

from dataclasses import replace

import torch

from bundle.mcore import mtp, rotary
from bundle.verification.numbers import (
    DENSE_HF_CONFIG,
    Bench,
    BenchLayout,
    Numbers,
    RankBatch,
    draw_sequences_with_next_token,
    find_worst,
    measure_gap,
    sum_token_losses,
)

_TWO_DEPTHS = {"layers": 2}


def measure_context_parallel(bench: Bench) -> float:
    """Measure the gradients of a per-token and a mean loss, and logged losses: two ranks against one."""
    return bench.measure_gap_to_one_rank(_compute_mtp_gradients_and_losses, cp=2)


def _compute_mtp_gradients_and_losses(layout: BenchLayout) -> Numbers:
    tokens = torch.stack(draw_sequences_with_next_token((32, 32)))
    mask = torch.ones(2, 32)
    mask[:, :3] = 0  # a prompt
    mask[0, 20:29] = 0  # leaves the two ranks with different numbers of tokens
    batch = layout.build_batch(tokens, mask)
    mtp.clear_logged_losses()
    token_numbers = layout.run_backward(layout.build_chunk(DENSE_HF_CONFIG, mtp=_TWO_DEPTHS), [batch])
    logged = layout.sum_over_cp_ranks(mtp.read_local_losses()) / layout.cp.size
    mean = {"calculate_per_token_loss": False}
    averaged = layout.run_backward(layout.build_chunk(DENSE_HF_CONFIG, mean, mtp=_TWO_DEPTHS), [batch])
    # The layers' own gradients are of a mean, which data-parallel reduction averages over these ranks.
    layer_gradients = {f"mean {k}": v / layout.cp.size for k, v in _select_mtp_numbers(averaged).items()}
    return {**token_numbers, **layer_gradients, "logged": logged}


def measure_per_token_gradients(bench: Bench) -> float:
    """Measure the MTP layers' gradients of a per-token loss, on one and two ranks, against those of a mean.

    The mean is over the tokens that the rolls leave, times the tokens of the main loss.
    """
    lengths, gaps = (8, 8), []
    tokens, mask = torch.stack(draw_sequences_with_next_token(lengths)), torch.ones(2, 8)
    with bench.open_layout() as layout:
        model = layout.build_chunk(DENSE_HF_CONFIG, {"calculate_per_token_loss": False}, mtp=_TWO_DEPTHS)
        mean = _select_mtp_numbers(layout.run_backward(model, [layout.build_batch(tokens, mask)]))
    for sizes in ({}, {"cp": 2}):
        with bench.open_layout(**sizes) as layout:
            model = layout.build_chunk(DENSE_HF_CONFIG, mtp=_TWO_DEPTHS)
            seen = _select_mtp_numbers(layout.run_backward(model, [layout.build_batch(tokens, mask)]))
            gaps.append(measure_gap(seen, {name: sum(lengths) * x for name, x in mean.items()}))
    return max(gaps)


def _select_mtp_numbers(seen: Numbers) -> Numbers:
    """Return the numbers of the prediction layers."""
    return {name: x for name, x in seen.items() if name.startswith("mtp.")}


def measure_padded_against_unpacked(bench: Bench) -> float:
    """Measure packed sequences with padding between them, against one unpacked pass for each.

    All sequences have one length: the loss of each depth is divided by all tokens of a pass, be it a pack or
    a sequence.
    """
    with bench.open_layout() as layout:
        # Transformer Engine's unfused attention, on a GPU the only one in fp32, drops rows of padding.
        model = layout.build_chunk(DENSE_HF_CONFIG, mtp=_TWO_DEPTHS, attention="flash")
        return layout.measure_packed_gradient_gap(model, draw_sequences_with_next_token((10, 10, 10)))


def measure_recompute(bench: Bench) -> float:
    """Measure recomputed layers, on packed and on unpacked input, against layers without recomputation."""
    sequences = draw_sequences_with_next_token((12, 24, 6))
    gaps = []
    with bench.open_layout() as layout:
        for batches in (
            [layout.pack_padded_sequences(sequences, multiple=1)],
            layout.build_single_batches(sequences),
        ):
            plain, again = (
                layout.run_backward(
                    layout.build_chunk(DENSE_HF_CONFIG, mtp={"layers": 1}, recompute=recompute), batches
                )
                for recompute in (None, {"granularity": "full"})
            )
            gaps.append(measure_gap(again, plain))
    return find_worst(gaps)


def measure_zero_layers(bench: Bench) -> float:
    """Measure the logits of a model configured with 0 layers, against one without that setting."""
    with bench.open_layout() as layout:
        batch = layout.build_two_rows()
        reference = _compute_logits(layout.build_chunk(DENSE_HF_CONFIG), batch)
        zero = layout.build_chunk(DENSE_HF_CONFIG, {"mtp_num_layers": 0})
        return measure_gap({"logits": _compute_logits(zero, batch)}, {"logits": reference})


def measure_logits_without_labels(bench: Bench) -> float:
    """Measure the logits of a model with a prediction layer and no labels, against a model without the layer.

    The gap is at least the number of times that the layer ran without labels, in training and in evaluation.
    It is also at least the number of the layer's weights with a gradient: there must be none.
    """
    with bench.open_layout() as layout:
        batch = layout.build_two_rows()
        reference = {"logits": _compute_logits(layout.build_chunk(DENSE_HF_CONFIG), batch)}
        model = layout.build_chunk(DENSE_HF_CONFIG, mtp={"layers": 1})
        ran: list[float] = []
        model.mtp.register_forward_hook(lambda *_: ran.append(1.0))
        gaps = []
        for training in (True, False):
            logits = _compute_logits(model.train(training), batch)
            logits.sum().backward()
            gaps.append(measure_gap({"logits": logits}, reference))
        trained_for_nothing = [1.0 for p in model.mtp.parameters() if p.grad is not None and p.grad.any()]
        with_labels = sum_token_losses(model, batch)  # and it still runs where there are labels
        assert torch.isfinite(with_labels), "no loss with labels"
        return find_worst([*gaps, sum(ran[:-1]), sum(trained_for_nothing)]) if ran else float("inf")


def _compute_logits(model: torch.nn.Module, batch: RankBatch) -> torch.Tensor:
    logits: torch.Tensor = model(batch.ids, batch.positions, None, loss_mask=batch.mask)
    return logits


def measure_unsharded_embeddings(bench: Bench) -> float:
    """Measure prediction layers after an embedding that does not scatter, against one that does.

    Both run on two tensor-parallel ranks.
    """
    with bench.open_layout(tp=2) as layout:
        batch = layout.build_two_rows()
        seen = []
        for is_unsharded in (True, False):
            model = layout.build_chunk(DENSE_HF_CONFIG, mtp={"layers": 2})
            embedding = model.embedding
            decoder_input = embedding(batch.ids, batch.positions).detach()
            if is_unsharded:
                embedding.scatter_to_sequence_parallel = embedding.reduce_scatter_embeddings = False
                embedding.word_embeddings.reduce_scatter_embeddings = False
            loss = sum_token_losses(model, batch, decoder_input=decoder_input)
            loss.backward()
            seen.append({"loss": loss.detach(), **layout.collect_cp_summed_gradients(model)})
        return measure_gap(*seen)


def measure_dense_cp_packed_mrope(bench: Bench) -> float:
    """Measure padded sequences with positions in time, height and width, packed for two ranks.

    The reference is a pass on one rank for each sequence alone.
    """
    lengths, multiple = (12, 24, 6), 8
    sequences = draw_sequences_with_next_token(lengths)
    generator = torch.Generator().manual_seed(9)
    positions = [torch.randint(0, 40, (3, 1, n), generator=generator).to(bench.device) for n in lengths]
    with bench.open_layout() as layout:
        single_batches = zip(layout.build_single_batches(sequences), positions, strict=True)
        batches = [
            replace(batch, positions=sequence_positions) for batch, sequence_positions in single_batches
        ]
        reference = layout.run_backward(_build_dense_mrope_model(layout), batches)
    with bench.open_layout(cp=2) as layout:
        padded = [
            torch.nn.functional.pad(sequence_positions, (0, -sequence_positions.shape[-1] % multiple))
            for sequence_positions in positions
        ]
        batch = replace(layout.pack_padded_sequences(sequences, multiple), positions=torch.cat(padded, -1))
        return measure_gap(layout.run_backward(_build_dense_mrope_model(layout), [batch]), reference)


def _build_dense_mrope_model(layout: BenchLayout) -> torch.nn.Module:
    model = layout.build_chunk(DENSE_HF_CONFIG)
    rotary.use_megatron_mrope(model, (2, 3, 3), base=100)
    return model
