"""What ranks stream of a model in a layout, against the files that it began with and those it exports.

python -m tests.rollouts.streamed DIRECTORY LAYOUT... prints an object on rank 0: "LAYOUT: case" -> the
largest distance of a log-probability of the engine from transformers' model that the stream filled. In
DIRECTORY are published weights, by family. Whatever is not equal bit by bit fails.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from bundle import pretrained
from tests import world
from tests.ranks import finish_rank, start_rank
from tests.rollouts.families import CONFIGS

TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "one process": ({}, ("mimo", "tied", "latent", "stacks", "mimo lora", "glm lora")),
    "dp2": ({}, ("tied",)),
    "tp2": ({"tp": 2, "sequence_parallel": True}, ("mimo", "tied", "latent", "mimo lora")),
    "pp2": ({"pp": 2}, ("mimo", "tied", "latent")),
    "pp2 vpp2": ({"pp": 2, "vpp": 2}, ("linear",)),
    "ep2": ({"ep": 2}, ("latent", "stacks", "glm lora")),
    "etp2": ({"tp": 2, "etp": 2, "sequence_parallel": True}, ("glm",)),
    "cp2": ({"cp": 2}, ("mimo",)),
}
TEMPERATURE = 0.7


def main(directory: Path, layouts: list[str]) -> None:
    runtime, rank = start_rank()
    cases = [(f"{layout}: {name}", (layout, name)) for layout in layouts for name in LAYOUTS[layout][1]]
    with runtime.megatron_calls():
        found = world.each(cases, lambda case: compare(*case, directory, runtime))
    finish_rank(found, rank)


def recipe(directory: Path, layout: str, name: str):
    from bundle.recipe import from_mapping

    family, _, adapted = name.partition(" ")
    lora = {"rank": 3, "alpha": 5.0, "targets": TARGETS, "dropout": 0.0} if adapted else None
    mtp = {"layers": 1} if "num_nextn_predict_layers" in CONFIGS[family] and not lora else {"layers": 0}
    return from_mapping(
        {
            "name": "streamed",
            "backend": "cpu",
            "seed": 3,
            "model": {
                "path": str(directory / family),
                "config": CONFIGS[family],
                "dtype": "fp32",
                "mtp": mtp,
                "lora": lora,
            },
            "parallel": LAYOUTS[layout][0] | ({"etp": 1} if family == "stacks" else {}),
            "data": {"source": "text", "path": ["none"], "sequence_length": 32, "tokenizer": "hf:none"},
            "train": {"steps": 9, "global_batch_size": 4},
            "optimizer": {"warmup_steps": 0, "lr": 1e-2},
        }
    )


def compare(layout: str, name: str, directory: Path, runtime) -> float:
    from bundle.architectures.tensors import Tensors
    from bundle.engine import Engine
    from bundle.mcore import groups
    from bundle.models import adapters, exporting
    from bundle.models.streaming import TensorStream
    from bundle.pretrained.writing import PublishedModel
    from bundle.rollouts.transformers import TransformersRollout

    job = recipe(directory, layout, name)
    made = groups.create_model_parallel_groups(job.parallel, seed=1, timeout_seconds=60)
    engine = Engine(job, runtime, made, torch.device("cpu"), pretrained.find_recipe_weights(job))
    for matrix in adapters.list_matrices(engine.models):
        whole = torch.randn(matrix.compute_full_shape(), generator=matrix.make_generator(1)) * 0.2
        with torch.no_grad():
            matrix.parameter.copy_(matrix.extract_shard(whole))
    copies = exporting.list_tensor_copies_to_write(directory, PublishedModel.from_recipe(job))
    stream = TensorStream.from_chunks(engine.models, made, Tensors(job.architecture, made.tp.size, copies))
    twin = TransformersRollout(
        job.model.config, job.architecture, dtype=torch.float32, device=torch.device("cpu"), batch_limit=3
    )
    distance = 0.0
    before: dict[str, torch.Tensor] = {}
    for version in (0, 1):
        out = directory / "exported" / layout / f"{name} {version}"
        exporting.export(out, job, engine.models, made)
        files = read(out)
        check_receivers(
            stream, files, (0, dist.get_world_size() - 1, "owner", "all") if not version else ("all",)
        )
        # Ranks of other layers or experts own some; parts and replicas are the first rank's.
        is_shared = layout.startswith("pp2") or (layout == "ep2" and name != "stacks")
        assert stream.distinct_owner_ranks == ([0, 1] if is_shared else [0])
        if version == 0 and job.model.lora is None:
            source = read(directory / name)  # what it began with
            assert source.keys() == files.keys()
            assert all(torch.equal(files[key], value) for key, value in source.items())
        changed = [key for key in files if version and not torch.equal(files[key], before[key])]
        assert bool(changed) == bool(version)
        before = files
        twin.sync(version, stream.publish("fp32", "all"))
        assert set(twin.ignored_names) == twin._builder.mtp_names & files.keys()
        check_model(twin.synced_model, out, job)
        if made.cp.size == 1:
            distance = max(distance, measure(engine, twin))
        engine.forward_backward([build_batch(engine, [[*range(17)]])] * 2)
        engine.step_optimizer()
        engine.gather_weights()
    groups.destroy_model_parallel_groups()
    return distance


def read(directory: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in sorted(directory.glob("model*.safetensors")) for k, v in load_file(path).items()}


def check_receivers(stream, files: dict[str, torch.Tensor], receivers) -> None:
    """Those that ask, and no others, get each tensor once, bit by bit."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for receiver in receivers:
        received = [(key, value.clone()) for key, value in stream.publish("fp32", receiver)]
        assert all(torch.equal(value, files[key]) for key, value in received)
        assert all(value.dtype == files[key].dtype for key, value in received)
        names_by_rank: list[Any] = [None] * size
        dist.all_gather_object(names_by_rank, [key for key, _ in received])
        if receiver == "owner":
            owners = stream.distinct_owner_ranks
            assert [bool(names) for names in names_by_rank] == [one in owners for one in range(size)]
            assert sorted(name for names in names_by_rank for name in names) == sorted(files)
        else:
            assert sorted(names_by_rank[rank]) == (sorted(files) if receiver in ("all", rank) else [])


def check_model(model, directory: Path, job) -> None:
    """The model holds what transformers itself reads from the export."""
    import copy

    from transformers import AutoConfig, AutoModelForCausalLM

    known = {}
    if job.architecture.model_type == "mimo":
        entries = {k: v for k, v in copy.deepcopy(job.model.config).items() if k != "model_type"}
        known = {"config": AutoConfig.for_model("qwen2", **entries)}
    opened = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **known)
    expected, found = opened.state_dict(), model.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[key]) for key, value in expected.items())


def build_batch(engine, rows: list[list[int]]):
    from bundle.engine.microbatch import from_rows

    ids = torch.tensor(rows)
    mask, temperatures = torch.ones(ids.shape[0], ids.shape[1] - 1), torch.full((len(rows),), TEMPERATURE)
    cp, layers = engine.groups.cp, engine.recipe.architecture.mtp_layers
    return from_rows(
        ids[:, :-1], ids[:, 1:], mask, cp=cp.size, rank=cp.rank, mtp_layers=layers, temperatures=temperatures
    )


def measure(engine, twin) -> float:
    """The largest distance of the log-probs that came with answers from the engine's own."""
    from bundle.rollouts import Request, Sampling

    prompts = [(1, 2, 3, 4, 5), (9, 8, 7), (9, 8, 7), (30, 36, 31, 0)]
    requests = [Request(ids, number, 0) for number, ids in enumerate(prompts)]
    answers = twin.generate(requests, Sampling(TEMPERATURE, 12, (), seed=1, step=1))
    rows = [[*request.ids, *answer.ids] for request, answer in zip(requests, answers, strict=True)]
    length = 17
    batch = build_batch(engine, [row + [0] * (length - len(row)) for row in rows])
    scores = engine.compute_log_probs([batch] * 2)[1].log_probs  # vpp needs as many as stages
    return max(
        float((scores[number, start : start + 12] - torch.from_numpy(answer.log_probs)).abs().max())
        for number, answer in enumerate(answers)
        for start in [len(prompts[number]) - 1]
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
