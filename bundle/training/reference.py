"""What the reference of a preference run says of every answer: computed once, before training, and kept.

The reference is what training begins with, or the model without its adapters: there is never a second model.
Its log-probabilities, a number for each answer, lie on the host and in the run directory, named by the data
and by the weights that they are of; a killed job goes on with those that it finds there.
"""

import logging
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from bundle import files
from bundle.data import Batch, Corpus
from bundle.distributed.watchdog import Watchdog
from bundle.distributed.world import on_all_ranks, on_rank_0
from bundle.engine import Engine
from bundle.errors import JobFailed
from bundle.pretrained import Pretrained
from bundle.recipe import Recipe
from bundle.training.loop import Batches, lengths_of, unpadded

_log = logging.getLogger(__name__)

SECONDS = 30.0  # between two writes: what a kill costs at most
Numbers = NDArray[np.float64]


class Identity(NamedTuple):
    """What log-probabilities are of: digests of the data, and of the weights where these are at hand."""

    data: str
    weights: str | None

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        corpus: Corpus,
        weights: Pretrained | None,
        origin: str,
        *,
        initial: bool,
    ) -> "Identity":
        """Of a run; `origin` tells the checkpoint that it began with, `initial`: whether its engine still has
        those weights.
        """
        tokens = {name: value for name, value in corpus.identity.items() if not name.startswith("packs")}
        entries = weights.entries.values() if weights else ()
        stats = [(path.name, _stat(path)) for path in sorted({entry.file for entry in entries})]
        made = [recipe.model.dump(), recipe.seed, stats, origin]
        return cls(files.json_digest(tokens), files.json_digest(made) if initial else None)


def log_probs(
    engine: Engine, batches: Batches, documents: int, kept: Path, identity: Identity, dog: Watchdog
) -> Numbers:
    """[documents] of a corpus: the log-probability of every answer, all tokens together, in nats.

    Not a number for documents that are neither trained on nor evaluated with. Every rank must call it; rank 0
    reads and writes `kept`. Raises JobFailed where some are missing that can be computed no more.
    """
    found = on_rank_0(lambda: _read(kept, documents, identity))
    groups = engine.groups
    speaks = groups.tp.rank == groups.cp.rank == groups.pp.rank == 0
    written, computed = time.monotonic(), 0

    def lacking(wanted: NDArray[np.int64]) -> bool:
        """Whether some of these are not known yet; now and then rank 0 writes what is."""
        nonlocal written
        if dist.get_rank() == 0 and computed and time.monotonic() - written > SECONDS:
            _write(kept, found, identity)
            written = time.monotonic()
        return bool(np.isnan(found[wanted]).any())

    for given, micro_batches in batches.once():
        numbers = np.concatenate([batch.documents for batch in given])
        real = numbers >= 0
        if not any(on_all_ranks(partial(lacking, numbers[real]))):
            continue
        if identity.weights is None:
            raise JobFailed(
                f"{kept}: log-probabilities of the reference are missing, and the weights that they are of"
                " have been trained since; put the file back, or begin the run anew (--fresh)"
            )
        scored = engine.reference_log_probs(micro_batches)
        sums = np.concatenate([_sums(*pair) for pair in zip(scored, given, strict=True)])
        for these, their in on_all_ranks(partial(_said, numbers[real], sums[real], speaks=speaks)):
            found[these] = their
            computed += len(these)
        dog.beat(f"the reference, {computed} answers")
    if computed:
        on_rank_0(lambda: _write(kept, found, identity))
        _log.info("the reference's log-probabilities of %s answers are in %s", f"{computed:,}", kept)
    return found


def _said(numbers: NDArray[np.int64], sums: Numbers, *, speaks: bool) -> tuple[NDArray[np.int64], Numbers]:
    """What a rank has found, where it speaks for its replica."""
    if not np.isfinite(sums).all():
        raise JobFailed("the reference's log-probability of an answer is no finite number")
    return (numbers, sums) if speaks else (numbers[:0], sums[:0])


def _sums(scored: Tensor, batch: Batch) -> Numbers:
    """The sum over the learned tokens of each sequence of a batch."""
    values = scored.cpu().double().where(unpadded(batch, batch.loss_mask) > 0, torch.zeros(()).double())
    lengths = np.asarray(lengths_of(batch))
    sums: Numbers = np.add.reduceat(values.numpy(), np.cumsum(lengths) - lengths)
    return sums


def _read(kept: Path, documents: int, identity: Identity) -> Numbers:
    """What is kept of these data and weights; nothing but NaN where there is nothing."""
    nothing = np.full(documents, np.nan)
    if not kept.exists():
        return nothing
    try:
        with np.load(kept, allow_pickle=False) as held:
            found: Numbers = held["log_probs"].astype(np.float64)
            said = {name: str(held[name]) for name in ("data", "weights")}
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise JobFailed(f"{kept}: cannot be read ({error}); begin the run anew (--fresh)") from error
    if found.shape != (documents,) or said["data"] != identity.data:
        _log.info("%s is of other data: the reference is computed anew", kept)
        return nothing
    if identity.weights is not None and said["weights"] != identity.weights:
        _log.info("%s is of other weights: the reference is computed anew", kept)
        return nothing
    return found


def _write(kept: Path, found: Numbers, identity: Identity) -> None:
    said: Mapping[str, Any] = {"data": identity.data, "weights": identity.weights}
    begun = kept.with_name(f".{kept.name}.partial")
    with begun.open("wb") as file:
        np.savez(file, log_probs=found, **said)
        file.flush()
        os.fsync(file.fileno())
    begun.replace(kept)


def _stat(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
