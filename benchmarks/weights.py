"""What it takes to load, import and export weights beside a plain copy of their files: time and memory.

Run with `python -m benchmarks.weights [--gib 2] [--directory DIR]`. Writes a Qwen3-shaped directory of random
bf16 weights, copies its files (and syncs them, as whoever writes a whole directory does), loads it into a
model of one rank as `train` does, exports that model, and converts the directory to a torch_dist checkpoint
and back. Printed are seconds, beside the copy, each of the fastest of RUNS, and by how much anonymous memory
(RssAnon: no page cache) grew at most, as a multiple of the largest tensor. Ends with 1 where one of BOUNDS is
exceeded. The fastest was disturbed least: memory that a virtual machine's host has to find first makes any of
them three times as long.
"""

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bundle import pretrained
from bundle.architectures import from_config
from bundle.architectures.tensors import Tensors
from bundle.planning import build_plan
from bundle.pretrained.writing import (
    OutputTensorHeader,
    PublishedModel,
    SafetensorsFileWriter,
    build_file_names,
    split_into_files,
    write_index_if_sharded,
)
from bundle.recipe import Recipe, from_mapping
from bundle.worker import prepare_runtime

# Seconds as a multiple of the copy's; the growth of memory as a multiple of the largest tensor.
BOUNDS = {
    "load": (1.5, 2.0),
    "export": (2.5, 2.0),
    "weights import": (1.5, 2.0),
    "weights export": (2.5, 2.0),
}
RUNS = 3
FILE = 500 * 2**20  # bytes of one file
SHAPE: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 65536,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}


@dataclass
class Measured:
    """Seconds, and the bytes by which anonymous memory grew at most."""

    seconds: float = 0.0
    grown: int = 0


def main() -> None:
    """Prints a line for each way; ends with 1 where one exceeds its bounds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=2.0, help="size of the weights")
    parser.add_argument("--directory", type=Path, help="where to write; without it, a temporary directory")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        root = Path(name)
        config = written(root / "model", options.gib)
        found = pretrained.find_model_weights(root / "model", config, from_config(config))
        largest = max(entry.stop - entry.start for entry in found.entries.values())
        print(f"{found}; the largest tensor has {largest / 2**20:.0f} MiB")
        copy = measured(lambda: copied(root / "model", root / "copy"), root / "copy")
        print(f"{'copy':<15} {copy.seconds:6.1f} s")
        sys.exit(max([told(way, of, copy, largest) for way, of in ways(root, config)]))


def told(way: str, of: Measured, copy: Measured, largest: int) -> int:
    """Prints what was measured; 1 where it exceeds its bounds."""
    times, tensors = of.seconds / copy.seconds, of.grown / largest
    most_times, most_tensors = BOUNDS[way]
    exceeded = times > most_times or tensors > most_tensors
    against = f"{times:4.2f} copies (at most {most_times}), {tensors:4.2f} tensors (at most {most_tensors})"
    print(f"{way:<15} {of.seconds:6.1f} s  {against}{'  EXCEEDED' if exceeded else ''}", flush=True)
    return int(exceeded)


def ways(root: Path, config: dict) -> Iterator[tuple[str, Measured]]:
    """Each way with what it took; what it wrote is removed."""
    job = recipe(root / "model")
    runtime = prepare_runtime(build_plan(job, backend="cpu", per_node=1).patch_plan, "cpu")
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=0, world_size=1)
    with runtime.megatron_calls():
        from bundle.mcore import groups
        from bundle.mcore.gpt import build_transformer_config
        from bundle.mcore.torch_dist import TorchDistCheckpoint
        from bundle.models import conversion, exporting, gpt, loading

        # Before there is a model, whose memory would be taken again rather than grow.
        weights, table = pretrained.find_recipe_weights(job), Tensors(job.architecture)
        assert weights is not None
        imported, exported = root / "megatron", root / "hf"
        yield "weights import", measured(lambda: conversion.to_torch_dist(weights, table, imported), imported)
        conversion.to_torch_dist(weights, table, imported)
        checkpoint = TorchDistCheckpoint(conversion.resolve_tracked_checkpoint(imported))
        model = PublishedModel(config, job.architecture)
        yield (
            "weights export",
            measured(
                lambda: conversion.write_full_hugging_face_model(checkpoint, model, exported, "bf16"),
                exported,
            ),
        )
        shutil.rmtree(imported)
        made = groups.create_model_parallel_groups(job.parallel, seed=1, timeout_seconds=60)
        chunks = gpt.build_chunks(
            job, build_transformer_config(job, runtime.build_config_options(job)), runtime, made
        )
        yield "load", measured(lambda: loading.load_and_list_unpublished(chunks, made, weights, table))
        yield "export", measured(lambda: exporting.export(exported, job, chunks, made), exported)


def written(directory: Path, gib: float) -> dict:
    """Writes random weights of about that size; returns their config."""
    one = Tensors(from_config(SHAPE | {"num_hidden_layers": 1}))
    layer = 2 * sum(tensor.elements for tensor in one.build_layer(0))
    around = 2 * 2 * SHAPE["vocab_size"] * SHAPE["hidden_size"]
    config = SHAPE | {"num_hidden_layers": max(1, round((gib * 2**30 - around) / layer))}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    stored = [
        OutputTensorHeader(name, "BF16", shape)
        for tensor in Tensors(from_config(config))
        for name, shape in tensor.list_published_shapes()
    ]
    files = list(split_into_files(stored, FILE))
    of = dict(zip(build_file_names(len(files)), files, strict=True))
    for name, share in of.items():
        file = SafetensorsFileWriter(directory / name, share)
        for tensor in share:
            values = (0.02 * torch.randn(tensor.shape)).bfloat16().flatten()
            file.append(memoryview(values.view(torch.uint8).numpy()))
        file.close()
    write_index_if_sharded(directory, of)
    return config


def recipe(directory: Path) -> Recipe:
    """A job of one rank that begins with the weights of a directory."""
    return from_mapping(
        {
            "name": "weights",
            "backend": "cpu",
            "model": {"path": str(directory)},
            "data": {"source": "text", "path": ["none"], "tokenizer": "hf:none", "sequence_length": 64},
            "train": {"steps": 1, "global_batch_size": 1},
        }
    )


def copied(source: Path, target: Path) -> None:
    """Copies a directory, and puts each file on the disk."""
    shutil.copytree(source, target)
    for path in target.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())


def measured(work: Callable[[], object], written: Path | None = None) -> Measured:
    """What the work takes; memory is looked at every millisecond. What it has `written` is removed."""
    found = Measured(math.inf)
    for _ in range(RUNS):
        with watched(found):
            begun = time.perf_counter()
            work()
            found.seconds = min(found.seconds, time.perf_counter() - begun)
        if written is not None:
            shutil.rmtree(written)
    return found


@contextmanager
def watched(found: Measured) -> Iterator[None]:
    """Notes by how much anonymous memory grows inside."""
    done, before = threading.Event(), anonymous()

    def watch() -> None:
        while not done.wait(0.001):
            found.grown = max(found.grown, anonymous() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def anonymous() -> int:
    """Bytes of this process's memory that are no file's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not say RssAnon in /proc/self/status")


if __name__ == "__main__":
    main()
