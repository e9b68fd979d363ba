"""Models that put other embeddings among those of the text, against what does the same to text."""

from dataclasses import replace

import torch

from bundle.mcore import rotary
from bundle.mcore.groups import Groups
from bundle.verification.bench import Bench
from bundle.verification.numbers import gap, gradients, run, trained
from bundle.verification.tiny import DENSE, chunk, packed, rows, single, texts


def whole_embeddings(bench: Bench) -> float:
    """Prediction layers behind an embedding that shares nothing out, against one that does, on two ranks."""
    with bench.layout(tp=2) as groups:
        batch = rows(bench, groups, torch.stack(texts((16, 16))), torch.ones(2, 16))
        seen = []
        for whole in (True, False):
            model = chunk(bench, groups, DENSE, mtp={"layers": 2})
            embedding = model.embedding
            given = embedding(batch.ids, batch.positions).detach()
            if whole:
                embedding.scatter_to_sequence_parallel = embedding.reduce_scatter_embeddings = False
                embedding.word_embeddings.reduce_scatter_embeddings = False
            loss = run(model, batch, decoder_input=given)
            loss.backward()
            seen.append({"loss": loss.detach(), **gradients(model, groups)})
        return gap(*seen)


def packed_positions(bench: Bench) -> float:
    """Padded sequences with positions in time, height and width, packed for two ranks, against each alone."""
    lengths, multiple = (12, 24, 6), 8
    sequences = texts(lengths)
    generator = torch.Generator().manual_seed(9)
    positions = [torch.randint(0, 40, (3, 1, n), generator=generator).to(bench.device) for n in lengths]
    with bench.layout() as groups:
        alone = zip(single(bench, groups, sequences), positions, strict=True)
        batches = [replace(batch, positions=of) for batch, of in alone]
        reference = trained(_multimodal(bench, groups), groups, batches)
    with bench.layout(cp=2) as groups:
        padded = [torch.nn.functional.pad(of, (0, -of.shape[-1] % multiple)) for of in positions]
        batch = replace(packed(bench, groups, sequences, multiple), positions=torch.cat(padded, -1))
        return gap(trained(_multimodal(bench, groups), groups, [batch]), reference)


def _multimodal(bench: Bench, groups: Groups) -> torch.nn.Module:
    model = chunk(bench, groups, DENSE)
    rotary.use_three_positions(model, (2, 3, 3), base=100)
    return model
