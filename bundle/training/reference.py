"""What the reference of a preference run says of every answer: computed once, before training, and kept.

The reference is what training begins with, or the model without its adapters: there is never a second model.
Its log-probabilities, a number for each answer, lie on the host and in the run directory, named by the data
and by the weights that they are of; a killed job goes on with those that it finds there.
"""

import logging
import os
import time
from collections.abc import Mapping, Sequence
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
from bundle.data import Corpus, SampleBatch
from bundle.distributed.watchdog import Watchdog
from bundle.distributed.world import run_and_all_gather_results, run_on_rank_0
from bundle.engine import Engine, MicroBatch
from bundle.errors import JobFailed
from bundle.pretrained import PretrainedWeights
from bundle.recipe import Recipe
from bundle.training.loop import Batches, get_sequence_lengths, remove_padding

_log = logging.getLogger(__name__)

CACHE_WRITE_INTERVAL_SECONDS = 30.0  # between two writes: what a kill costs at most
Numbers = NDArray[np.float64]


class ReferenceIdentity(NamedTuple):
    """What log-probabilities are of: digests of the data, and of the weights where these are at hand."""

    data: str
    weights: str | None

    @classmethod
    def from_run(
        cls,
        recipe: Recipe,
        corpus: Corpus,
        weights: PretrainedWeights | None,
        origin: str,
        *,
        initial: bool,
    ) -> "ReferenceIdentity":
        """Return the identity of a run's log-probabilities.

        `origin` names the checkpoint that the run began with. `initial` says whether its engine still has
        those weights.
        """
        tokens = {name: value for name, value in corpus.identity.items() if not name.startswith("packs")}
        entries = weights.entries.values() if weights else ()
        stats = [(path.name, _read_stat(path)) for path in sorted({entry.file for entry in entries})]
        weight_sources = [recipe.model.dump(), recipe.seed, stats, origin]
        return cls(
            files.compute_short_json_digest(tokens),
            files.compute_short_json_digest(weight_sources) if initial else None,
        )


def compute_log_probs(
    engine: Engine,
    batches: Batches,
    documents: int,
    cache_file: Path,
    identity: ReferenceIdentity,
    dog: Watchdog,
) -> Numbers:
    """Return the log-probability of every answer of a corpus [documents], all tokens together, in nats.

    It is NaN for documents that are neither trained on nor evaluated with. Every rank must call it; rank 0
    reads and writes `cache_file`. Raises JobFailed where some are missing that can no longer be computed.
    """
    log_probs = run_on_rank_0(lambda: _read(cache_file, documents, identity))
    groups = engine.groups
    is_reporter = groups.tp.rank == groups.cp.rank == groups.pp.rank == 0
    written, computed = time.monotonic(), 0

    def has_missing_log_probs(document_numbers: NDArray[np.int64]) -> bool:
        """Return whether some of these are not known yet; from time to time rank 0 writes the known ones."""
        nonlocal written
        if dist.get_rank() == 0 and computed and time.monotonic() - written > CACHE_WRITE_INTERVAL_SECONDS:
            _write(cache_file, log_probs, identity)
            written = time.monotonic()
        return bool(np.isnan(log_probs[document_numbers]).any())

    for host_batches, micro_batches in batches.iterate_all_samples():
        numbers = np.concatenate([batch.documents for batch in host_batches])
        is_document = numbers >= 0
        if not any(run_and_all_gather_results(partial(has_missing_log_probs, numbers[is_document]))):
            continue
        if identity.weights is None:
            raise JobFailed(
                f"{cache_file}: log-probabilities of the reference are missing, and its weights were"
                " trained since. Restore the file, or start over (--fresh)"
            )
        scored = _compute_reference_token_log_probs(engine, micro_batches)
        sums = np.concatenate([_sum_log_probs(*pair) for pair in zip(scored, host_batches, strict=True)])
        for rank_numbers, rank_sums in run_and_all_gather_results(
            partial(_select_reporter_sums, numbers[is_document], sums[is_document], is_reporter=is_reporter)
        ):
            log_probs[rank_numbers] = rank_sums
            computed += len(rank_numbers)
        dog.report_progress(f"the reference, {computed} answers")
    if computed:
        run_on_rank_0(lambda: _write(cache_file, log_probs, identity))
        _log.info("saved the reference's log-probabilities of %s answers in %s", f"{computed:,}", cache_file)
    return log_probs


def _select_reporter_sums(
    numbers: NDArray[np.int64], sums: Numbers, *, is_reporter: bool
) -> tuple[NDArray[np.int64], Numbers]:
    """Return the sums of a rank that reports for its replica; empty arrays for other ranks.

    Raises JobFailed for a sum that is not finite.
    """
    if not np.isfinite(sums).all():
        raise JobFailed("the reference's log-probability of an answer is not finite")
    return (numbers, sums) if is_reporter else (numbers[:0], sums[:0])


def _compute_reference_token_log_probs(engine: Engine, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
    """Return the log-probabilities by the reference; without adapters the weights are still its own."""
    if engine.recipe.model.lora is not None:
        return engine.compute_reference_log_probs(micro_batches)
    return [scores.log_probs for scores in engine.compute_log_probs(micro_batches)]


def _sum_log_probs(scored: Tensor, batch: SampleBatch) -> Numbers:
    """Return the sum over the learned tokens of each sequence of a batch."""
    values = scored.cpu().double().where(remove_padding(batch, batch.loss_mask) > 0, torch.zeros(()).double())
    lengths = np.asarray(get_sequence_lengths(batch))
    sums: Numbers = np.add.reduceat(values.numpy(), np.cumsum(lengths) - lengths)
    return sums


def _read(cache_file: Path, documents: int, identity: ReferenceIdentity) -> Numbers:
    """Return the cached log-probabilities of these data and weights; all NaN where there are none."""
    empty = np.full(documents, np.nan)
    if not cache_file.exists():
        return empty
    try:
        with np.load(cache_file, allow_pickle=False) as archive:
            log_probs: Numbers = archive["log_probs"].astype(np.float64)
            digests = {name: str(archive[name]) for name in ("data", "weights")}
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise JobFailed(f"{cache_file}: cannot be read ({error}). Start over (--fresh)") from error
    if log_probs.shape != (documents,) or digests["data"] != identity.data:
        _log.info("%s is of other data: recomputing the reference", cache_file)
        return empty
    if identity.weights is not None and digests["weights"] != identity.weights:
        _log.info("%s is of other weights: recomputing the reference", cache_file)
        return empty
    return log_probs


def _write(cache_file: Path, log_probs: Numbers, identity: ReferenceIdentity) -> None:
    digests: Mapping[str, Any] = {"data": identity.data, "weights": identity.weights}
    partial_file = cache_file.with_name(f".{cache_file.name}.partial")
    with partial_file.open("wb") as file:
        np.savez(file, log_probs=log_probs, **digests)
        file.flush()
        os.fsync(file.fileno())
    partial_file.replace(cache_file)


def _read_stat(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
