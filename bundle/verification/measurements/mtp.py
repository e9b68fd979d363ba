"""Multi-token prediction, and embeddings and positions of multimodal models."""

from dataclasses import replace

import torch

from bundle.mcore import mtp, rotary
from bundle.verification.numbers import DENSE, Batch, Bench, Layout, Numbers, gap, run, texts, worst

_TWO_DEPTHS = {"layers": 2}


def context_parallel(bench: Bench) -> float:
    """Gradients of a per-token and of a mean loss, and the logged losses: two ranks against one."""
    return bench.gap_to_one_rank(_seen, cp=2)


def _seen(layout: Layout) -> Numbers:
    tokens = torch.stack(texts((32, 32)))
    mask = torch.ones(2, 32)
    mask[:, :3] = 0  # a prompt
    mask[0, 20:29] = 0  # leaves the two ranks with different numbers of tokens
    batch = layout.rows(tokens, mask)
    mtp.clear_logged_losses()
    per_token = layout.trained(layout.chunk(DENSE, mtp=_TWO_DEPTHS), [batch])
    logged = layout.summed(mtp.logged_losses()) / layout.cp.size
    mean = {"calculate_per_token_loss": False}
    averaged = layout.trained(layout.chunk(DENSE, mean, mtp=_TWO_DEPTHS), [batch])
    # The layers' own gradients are of a mean, which data-parallel reduction averages over these ranks.
    own = {f"mean {k}": v / layout.cp.size for k, v in _own(averaged).items()}
    return {**per_token, **own, "logged": logged}


def per_token(bench: Bench) -> float:
    """The layers' gradients of a loss per token, of one rank and of two, against those of a mean.

    A mean over the tokens that are left, times the tokens of the main loss.
    """
    lengths, gaps = (8, 8), []
    tokens, mask = torch.stack(texts(lengths)), torch.ones(2, 8)
    with bench.layout() as layout:
        model = layout.chunk(DENSE, {"calculate_per_token_loss": False}, mtp=_TWO_DEPTHS)
        mean = _own(layout.trained(model, [layout.rows(tokens, mask)]))
    for sizes in ({}, {"cp": 2}):
        with bench.layout(**sizes) as layout:
            model = layout.chunk(DENSE, mtp=_TWO_DEPTHS)
            seen = _own(layout.trained(model, [layout.rows(tokens, mask)]))
            gaps.append(gap(seen, {name: sum(lengths) * x for name, x in mean.items()}))
    return max(gaps)


def _own(seen: Numbers) -> Numbers:
    """The numbers of the layers of prediction."""
    return {name: x for name, x in seen.items() if name.startswith("mtp.")}


def padded_packing(bench: Bench) -> float:
    """Packed sequences with padding between them, against one unpacked pass for each.

    All of one length: the loss of each depth is divided by all tokens of a pass, a pack or a sequence.
    """
    with bench.layout() as layout:
        # Transformer Engine's unfused attention, on a GPU the only one in fp32, drops rows of padding.
        model = layout.chunk(DENSE, mtp=_TWO_DEPTHS, attention="flash")
        return layout.packed_gap(model, texts((10, 10, 10)))


def recomputed(bench: Bench) -> float:
    """Layers that are computed again, on packed and on unpacked input, against layers that are kept."""
    sequences = texts((12, 24, 6))
    gaps = []
    with bench.layout() as layout:
        for batches in ([layout.packed(sequences, multiple=1)], layout.single(sequences)):
            kept, again = (
                layout.trained(layout.chunk(DENSE, mtp={"layers": 1}, recompute=how), batches)
                for how in (None, {"granularity": "full"})
            )
            gaps.append(gap(again, kept))
    return worst(gaps)


def zero_layers(bench: Bench) -> float:
    """Logits of a model that is configured with 0 layers, against one that is configured with none."""
    with bench.layout() as layout:
        batch = layout.two_rows()
        reference = _logits(layout.chunk(DENSE), batch)
        zero = layout.chunk(DENSE, {"mtp_num_layers": 0})
        return gap({"logits": _logits(zero, batch)}, {"logits": reference})


def without_labels(bench: Bench) -> float:
    """Logits of a model with a layer, against a model without; plus how often that layer ran.

    In training and in evaluation, with its gradients, which there must not be.
    """
    with bench.layout() as layout:
        batch = layout.two_rows()
        reference = {"logits": _logits(layout.chunk(DENSE), batch)}
        model = layout.chunk(DENSE, mtp={"layers": 1})
        ran: list[float] = []
        model.mtp.register_forward_hook(lambda *_: ran.append(1.0))
        gaps = []
        for training in (True, False):
            logits = _logits(model.train(training), batch)
            logits.sum().backward()
            gaps.append(gap({"logits": logits}, reference))
        trained_for_nothing = [1.0 for p in model.mtp.parameters() if p.grad is not None and p.grad.any()]
        with_labels = run(model, batch)  # and it still runs where there are labels
        assert torch.isfinite(with_labels), "no loss with labels"
        return worst([*gaps, sum(ran[:-1]), sum(trained_for_nothing)]) if ran else float("inf")


def _logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    logits: torch.Tensor = model(batch.ids, batch.positions, None, loss_mask=batch.mask)
    return logits


def whole_embeddings(bench: Bench) -> float:
    """Prediction layers behind an embedding that shares nothing out, against one that does, on two ranks."""
    with bench.layout(tp=2) as layout:
        batch = layout.two_rows()
        seen = []
        for whole in (True, False):
            model = layout.chunk(DENSE, mtp={"layers": 2})
            embedding = model.embedding
            given = embedding(batch.ids, batch.positions).detach()
            if whole:
                embedding.scatter_to_sequence_parallel = embedding.reduce_scatter_embeddings = False
                embedding.word_embeddings.reduce_scatter_embeddings = False
            loss = run(model, batch, decoder_input=given)
            loss.backward()
            seen.append({"loss": loss.detach(), **layout.gradients(model)})
        return gap(*seen)


def packed_positions(bench: Bench) -> float:
    """Padded sequences with positions in time, height and width, packed for two ranks, against each alone."""
    lengths, multiple = (12, 24, 6), 8
    sequences = texts(lengths)
    generator = torch.Generator().manual_seed(9)
    positions = [torch.randint(0, 40, (3, 1, n), generator=generator).to(bench.device) for n in lengths]
    with bench.layout() as layout:
        alone = zip(layout.single(sequences), positions, strict=True)
        batches = [replace(batch, positions=of) for batch, of in alone]
        reference = layout.trained(_multimodal(layout), batches)
    with bench.layout(cp=2) as layout:
        padded = [torch.nn.functional.pad(of, (0, -of.shape[-1] % multiple)) for of in positions]
        batch = replace(layout.packed(sequences, multiple), positions=torch.cat(padded, -1))
        return gap(layout.trained(_multimodal(layout), [batch]), reference)


def _multimodal(layout: Layout) -> torch.nn.Module:
    model = layout.chunk(DENSE)
    rotary.use_three_positions(model, (2, 3, 3), base=100)
    return model
