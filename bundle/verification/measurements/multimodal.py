"""Models that put other embeddings among those of the text, against what does the same to text."""

import torch

from bundle.verification.bench import Bench
from bundle.verification.numbers import gap, gradients, run
from bundle.verification.tiny import DENSE, chunk, rows, texts


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
