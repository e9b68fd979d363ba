"""One of two ranks that prepare a corpus: CASE. Leaves `said-RANK`, what it found and how often it wrote."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

from bundle import log
from bundle.data import cache, loader
from bundle.data import store as tokens
from bundle.data.sources import DataErrors
from bundle.data.store import RowChunk
from bundle.distributed import world
from bundle.distributed.watchdog import Watchdog
from bundle.launch import orphans, outcomes
from bundle.launch.rendezvous import discover
from bundle.recipe import load

SLOW_SECONDS, LIMIT_SECONDS = 8.0, 4.0


def slowly(written, seconds):
    """`store.write_store`, noting what it writes; the first 50 documents together take so many seconds."""

    def write(path, vocabulary, chunks, *rest):
        def late(first):
            for chunk in chunks(first):
                for count, row in enumerate(chunk.rows):
                    time.sleep(seconds / 50 if count < 50 else 0)
                    yield RowChunk([row], DataErrors("skip").dump() if count else chunk.errors)

        written.append(path)
        return original(path, vocabulary, late, *rest)

    original = tokens.write_store
    return write


def main() -> None:
    case, me, minute = sys.argv[1], discover(os.environ), timedelta(seconds=60)
    assert me.rank is not None and me.local_rank is not None
    log.start(me.rank)
    world.initialize(me, world.open_store(me, minute), "gloo", minute)
    written: list[Path] = []
    limit = 60.0
    seconds = 0.0
    if case in ("slow", "stuck"):
        limit = loader.READER_PATIENCE_SECONDS = LIMIT_SECONDS  # type: ignore[assignment]
        loader.LINE_SECONDS = 2.0
        seconds = SLOW_SECONDS if case == "slow" else 50 * 60.0
    cache.write_store = slowly(written, seconds)  # type: ignore[attr-defined]
    where, logs = Path("run").absolute(), Path("logs").absolute()
    if case == "different" and me.rank == 1:
        os.chdir("other")
    overrides = [
        "data.source=jsonl",
        "data.path=rows.jsonl",
        "data.sequence_length=16",
        "data.separator=null",
    ]
    recipe = load("demo", [*overrides, *sys.argv[2:]])
    with Watchdog(limit, logs, me.rank, me.local_rank) as dog:
        found = loader.prepare_on_ranks(recipe, where / "data", dog)
    (where.parent / f"said-{me.rank}").write_text(f"{found.tokens} tokens, wrote {len(written)}")
    world.destroy_process_groups()


if __name__ == "__main__":
    orphans.die_with_torchrun_agent()
    sys.exit(outcomes.run_and_report(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), main))
