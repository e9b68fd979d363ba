"""Builds the engine that a recipe asks for: its servers, or clients of servers that run already."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from packaging.version import InvalidVersion, Version

from bundle import files
from bundle.errors import EnvironmentUnfit, UsageError
from bundle.planning.rollout import (
    OLDEST_SGLANG,
    SHARED_MEMORY,
    choose_weight_transport,
    count_weights_folder_bytes,
)
from bundle.pretrained.writing import PublishedModel, write_config
from bundle.recipe import Recipe
from bundle.recipe.rl import RLRollout
from bundle.rollouts.sglang import ServedModel, SGLangRollout
from bundle.rollouts.sglang.checksums import ExpectedChecksumSource, ExpectedHashHelper, FirstReplicaChecksums
from bundle.rollouts.sglang.client import Client, Keys
from bundle.rollouts.sglang.memory import TrainerMemory
from bundle.rollouts.sglang.replicas import Replicas
from bundle.rollouts.sglang.server import ServerProcess, ServerReplica, check_installation
from bundle.weight_sync.manifest import ExpectedTensors, build_expected_tensors, read_header_tensors
from bundle.weight_sync.states import FreeMemoryWait
from bundle.weight_sync.transports.files import FilesTransport

API_KEY_VARIABLE, ADMIN_KEY_VARIABLE = "BUNDLE_ROLLOUT_API_KEY", "BUNDLE_ROLLOUT_ADMIN_KEY"
_START_SECONDS = 1800.0  # a large model compiles kernels first
# A server first runs a prompt of so many tokens; 0.5.16 fails with a CUDA error where positions end before.
_WARMUP_PROMPT_TOKENS = 8192
# CUDA graphs of so many sequences at once. SGLang's own limit on an H200, 256, cost a third of its speed.
_MOST_GRAPHED_SEQUENCES = 512
_DTYPE_NAMES_BY_RECIPE_DTYPE = {"bf16": ("bfloat16", "BF16"), "fp32": ("float32", "F32")}


def build_rollout(
    recipe: Recipe, logs: Path, folder: Path, memory: TrainerMemory | None = None
) -> SGLangRollout:
    """Return the engine of a recipe; servers that it starts are started by the first sync.

    `logs` gets their output and their config. Weights lie in `folder` where the recipe names no other and
    shared memory has no room. `memory` is that of the device where trainer and server take turns. Raise
    EnvironmentUnfit where there is no SGLang that fits, UsageError where servers that run already serve
    another model.
    """
    assert recipe.rl is not None
    settings = recipe.rl.rollout
    table = ExpectedTensors.from_architecture(recipe.architecture)
    name, stored = _DTYPE_NAMES_BY_RECIPE_DTYPE[recipe.model.dtype]
    declared = build_expected_tensors(table, stored)
    length = recipe.architecture.max_position_embeddings
    checksums: ExpectedChecksumSource = FirstReplicaChecksums()
    replicas: Sequence[Client]
    if settings.urls:
        keys = Keys(os.environ.get(API_KEY_VARIABLE, ""), os.environ.get(ADMIN_KEY_VARIABLE, ""))
        replicas = [Client(url, keys, settings.timeout_seconds) for url in settings.urls]
        infos = [replica.read_info() for replica in replicas]
        for url, info in zip(settings.urls, infos, strict=True):
            _check_minimum_version(url, str(info.get("version")))
        has_draft = any(info.get("speculative_algorithm") for info in infos)
        lengths = [info.get(key) for info in infos for key in ("context_length", "max_req_input_len")]
        length = min([length, *filter(None, lengths)])
        declared = _read_served_checkpoint_headers(infos) or declared
    else:
        python = settings.python or sys.executable
        check_installation(python)
        has_draft = any(argument.startswith("--speculative-algorithm") for argument in settings.arguments)
        if settings.tp == 1:
            checksums = ExpectedHashHelper(python, settings.timeout_seconds)
        replicas = _build_servers(recipe, python, logs, name, memory)
    _check_completion_leaves_prompt_room(settings, length)
    if not has_draft:
        declared = {key: tensor for key, tensor in declared.items() if key not in table.draft}
    return SGLangRollout(
        Replicas(
            replicas,
            declared,
            FilesTransport(_choose_weights_folder_by_space(recipe, folder), table, has_draft=has_draft),
            checksums,
            verify=settings.verify,
            memory=memory and FreeMemoryWait(memory.read_free_and_trainer_bytes, memory.needed),
            bucket_device=_find_bucket_transport_device(recipe, memory),
        ),
        ServedModel(recipe.architecture.vocab_size, length),
    )


def _build_servers(
    recipe: Recipe, python: str, logs: Path, dtype: str, memory: TrainerMemory | None
) -> list[ServerReplica]:
    assert recipe.rl is not None
    settings, model = recipe.rl.rollout, logs / "model"
    with files.convert_write_errors(model):
        model.mkdir(parents=True, exist_ok=True)
    write_config(model, PublishedModel.from_recipe(recipe), recipe.model.dtype)
    config = files.read_json_object(model / "config.json")
    # Its end tokens would end answers, too; those of the run stand in each request.
    config.pop("eos_token_id", None)
    files.write_json(model / "config.json", config)
    arguments = [
        "--model-path",
        str(model),
        "--load-format",
        "dummy",
        "--dtype",
        dtype,
        "--skip-tokenizer-init",
    ]
    arguments += ["--enable-memory-saver", "--tp-size", str(settings.tp)]
    sequences = min(_MOST_GRAPHED_SEQUENCES, -(-recipe.rl.answers_per_step // settings.replicas))
    arguments += ["--cuda-graph-max-bs-decode", str(sequences)]
    if (length := recipe.architecture.max_position_embeddings) < _WARMUP_PROMPT_TOKENS:
        arguments += ["--chunked-prefill-size", str(length)]

    def read_memory_arguments() -> list[str]:
        part = memory and memory.compute_mem_fraction_static()
        return [] if part is None else ["--mem-fraction-static", f"{part:.4f}"]

    return [
        ServerReplica(
            f"replica {number}",
            ServerProcess(
                python,
                [*arguments, "--base-gpu-id", str(number * settings.tp), *settings.arguments],
                logs / f"server-{number}.log",
                read_memory_arguments,
            ),
            seconds=settings.timeout_seconds,
            start_seconds=_START_SECONDS,
            ranks=settings.tp,
        )
        for number in range(settings.replicas)
    ]


def _find_bucket_transport_device(recipe: Recipe, memory: TrainerMemory | None) -> torch.device | None:
    """Return the device that trainer and server share, where weights go through its memory."""
    if memory is None or choose_weight_transport(recipe, memory.device.type, os.environ) == "files":
        return None
    return memory.device


def _choose_weights_folder_by_space(recipe: Recipe, folder: Path) -> Path:
    assert recipe.rl is not None
    if recipe.rl.rollout.weights_folder is not None:
        return Path(recipe.rl.rollout.weights_folder)
    has_room = SHARED_MEMORY.is_dir() and files.find_free_bytes(SHARED_MEMORY) >= count_weights_folder_bytes(
        recipe
    )
    return SHARED_MEMORY if has_room else folder


def _check_completion_leaves_prompt_room(settings: RLRollout, length: int) -> None:
    """Raise UsageError where no question has room before an answer."""
    if length <= settings.max_completion_length:
        raise UsageError(
            f"rl.rollout.max_completion_length: {settings.max_completion_length} leaves no room for a"
            f" question in the server's context of {length} tokens. Lower it, or start the server with a"
            " longer context."
        )


def _check_minimum_version(url: str, version: str) -> None:
    """Raise EnvironmentUnfit for a server of another kind or of an old release."""
    try:
        is_old = Version(version) < Version(OLDEST_SGLANG)
    except InvalidVersion:
        is_old = True
    if is_old:
        raise EnvironmentUnfit(
            f"rl.rollout.urls: {url} runs SGLang {files.to_printable(version)}. Use {OLDEST_SGLANG} or newer."
        )


def _read_served_checkpoint_headers(infos: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the tensors that the servers' checkpoint declares, where its files are on this machine."""
    paths = {str(info.get("model_path")) for info in infos}
    if len(paths) > 1:
        raise UsageError(
            "rl.rollout.urls: the servers serve different models. Name servers of one model.", sorted(paths)
        )
    directory = Path(paths.pop())
    return dict(read_header_tensors(directory)) if directory.is_dir() else {}
