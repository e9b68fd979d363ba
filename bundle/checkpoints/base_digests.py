"""Digests of the files that hold the base weights of adapters, computed while the run starts and trains."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch.distributed as dist

from bundle.checkpoints import manifest
from bundle.distributed.world import run_and_all_gather_results


class BackgroundDigests:
    """SHA-256 digests of files; a thread of each rank reads its share of them.

    The first step need not wait for them: a checkpoint is the first that needs them.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """Start the thread. `paths` are the same on all ranks."""
        self._local_digests: Future[dict[str, str]] = Future()
        self._digests: dict[str, str] | None = None
        own_paths = paths[dist.get_rank() :: dist.get_world_size()]
        threading.Thread(target=self._compute, args=(own_paths,), name="digests", daemon=True).start()

    def gather(self) -> Mapping[str, str]:
        """Wait for all ranks' threads; return the digest of each file by its name.

        All ranks call it. Raise JobFailed where a file cannot be read.
        """
        if self._digests is None:
            shares = run_and_all_gather_results(self._local_digests.result)
            self._digests = {name: digest for share in shares for name, digest in share.items()}
        return self._digests

    def _compute(self, paths: Sequence[Path]) -> None:
        try:
            self._local_digests.set_result({path.name: manifest.compute_digest(path) for path in paths})
        except OSError as error:
            self._local_digests.set_exception(error)
