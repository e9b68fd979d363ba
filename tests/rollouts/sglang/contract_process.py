"""The contract server as a process, with the command line of sglang.launch_server. Contract, not SGLang."""

import argparse
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.rollouts.sglang.contract_server import ContractServer, Engine
from tests.rollouts.sglang.contract_weights import DRAFT, KINDS, Kind, Weights, name_version


def build_twin_engine(config: dict[str, Any]) -> tuple[dict[str, Kind], Engine]:
    """transformers' own class behind the server, with the draws that the trainer's process makes."""
    import torch

    from bundle.architectures import from_config
    from bundle.rollouts import Request, Sampling
    from bundle.rollouts.sampling import choose_tokens, draw_uniforms
    from bundle.rollouts.twins import TransformersModelBuilder

    torch.set_num_threads(1)
    dtype = {"float32": "F32", "bfloat16": "BF16"}[config.get("dtype") or config["torch_dtype"]]
    kind = torch.float32 if dtype == "F32" else torch.bfloat16
    builder = TransformersModelBuilder(config, from_config(config), kind, torch.device("cpu"))
    kinds: dict[str, Kind] = {name: (dtype, tuple(shape)) for name, shape in builder.expected.items()}
    lock = threading.Lock()
    models: dict[int, Any] = {}

    def build_model(weights: Weights) -> Any:
        key = hash(tuple(weights.values.values()))
        if key not in models:
            models.clear()
            tensors = {
                name: torch.frombuffer(bytearray(values), dtype=kind).reshape(weights.kinds[name][1])
                for name, values in weights.values.items()
            }
            models[key] = builder.build(tensors)
        return models[key]

    def choose(weights: Weights, ids: list[int], params: dict[str, Any], rid: str) -> tuple[int, float]:
        seed, step, question, answer, offset = map(int, rid.split("/"))
        prompt = params.setdefault("prompt_length", len(ids))  # the first call is that of the prompt
        place = offset + len(ids) - prompt
        with lock, torch.inference_mode():
            logits = build_model(weights)(torch.tensor([ids])).logits[:, -1]
            sampling = Sampling(params["temperature"], place + 1, (), seed, step)
            uniforms = draw_uniforms(sampling, Request((0,), question, answer), place + 1)[place:]
            token, log_prob = choose_tokens(
                logits,
                params["temperature"],
                None if params.get("top_k") == 1 else torch.from_numpy(uniforms),
            )
        return int(token), float(log_prob)

    return kinds, choose


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", type=Path)
    for name in ("host", "api-key", "admin-api-key", "load-format", "dtype"):
        parser.add_argument(f"--{name}")
    for name in ("port", "tp-size", "base-gpu-id", "chunked-prefill-size", "cuda-graph-max-bs-decode"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("skip-tokenizer-init", "enable-memory-saver", "has-child", "dies-while-loading", "is-new"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--mem-fraction-static", type=float)
    parser.add_argument("--kill-at", type=int, default=math.inf)
    arguments = parser.parse_args()
    positions = json.loads((arguments.model_path / "config.json").read_text()).get("max_position_embeddings")
    assert not positions or (arguments.chunked_prefill_size or 8192) <= positions  # it rehearses so many
    assert (arguments.host, arguments.load_format) == ("127.0.0.1", "dummy")
    print(f"server_args=ServerArgs({arguments})", flush=True)  # SGLang logs its keys, too
    print("pid", os.getpid(), flush=True)
    if arguments.has_child:
        print(
            "child", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True
        )
    if arguments.dies_while_loading:
        raise MemoryError("not enough for the model")
    config = json.loads((arguments.model_path / "config.json").read_text())
    kinds, draft = KINDS, DRAFT
    engine: Engine = name_version
    if config:
        (kinds, engine), draft = build_twin_engine(config), frozenset()
    server = ContractServer(
        Weights(kinds, draft),
        engine,
        protocol="new" if arguments.is_new else "old",
        keys=SimpleNamespace(api=arguments.api_key, admin=arguments.admin_api_key),
        port=arguments.port,
    )
    # A server that is killed while it answers: at its so many-th answer, in its first life.
    marker = arguments.model_path / "killed"
    while not server.is_dead.wait(0.005):
        answers = sum(path == "/generate" for path, _ in server.calls)
        if answers >= arguments.kill_at and not marker.exists():
            marker.touch()
            os._exit(9)
    sys.exit(1)


if __name__ == "__main__":
    main()
