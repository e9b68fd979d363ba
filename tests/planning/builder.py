"""Builds every rank of several layouts in one process, and compares what is there with what was predicted.

python -m tests.planning.builder

The process group is torch's fake one: it has any size and moves nothing, so that one process can be each rank
in turn. Parameters, buffers and optimizer state are allocated as they would be; their values mean nothing.
"""

import functools
import json
import re
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch.testing._internal.distributed.fake_pg import FakeStore

from bundle.capabilities.cpu import LOCAL_LAYER_TRAITS
from bundle.environment.packages import MegatronCode
from bundle.planning.layout import ModelChunk, RankLayout, build_rank_layout
from bundle.planning.memory import StateBuffers, StateBytes, is_shared_embedding_across_buckets
from bundle.planning.problems import find_layout_string_problems
from bundle.planning.size import list_parameters
from bundle.recipe import Recipe
from tests.planning.jobs import DEEPSEEK, QWEN2_TIED, QWEN3, QWEN3_NEXT, job
from tests.planning.megatron import ready
from tests.reference.configs import CONFIGS
from tests.vision.cases import CASES as CASES_THAT_SEE

GPT_OSS = CONFIGS["gpt_oss"] | {"vocab_size": 300}
_FIRST, _LAST = ({f"num_layers_in_{end}_pipeline_stage": 1} for end in ("first", "last"))
_FOUR, _TWO = {"num_layers_in_first_pipeline_stage": 4}, {"num_layers_in_last_pipeline_stage": 2}


def _laid_out(pp: int, layout: str) -> dict[str, Any]:
    return {"pp": pp, "pipeline_model_parallel_layout": layout}


_LORA = {"rank": 3, "alpha": 6.0}
_DORA = {"use_dora": True, "loraplus_lr_ratio": 4.0}
_ADAPTED = {"lora": {**_LORA, "targets": ["q_proj", "v_proj", "o_proj", "up_proj"]}}
_LATENT = {"lora": {**_LORA, "targets": ["q_b_proj", "kv_a_proj_with_mqa", "gate_proj", "down_proj"]}}
SEEING = CASES_THAT_SEE[0].config
_ROWS = {"source": "jsonl", "path": ["none"], "sequence_length": 32, "tokenizer": "hf:none"}
_TALK = {"task": "sft", "data": {**_ROWS, "template": "chat"}}
_OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 6000}
CASES: tuple[tuple[int, dict[str, Any], dict[str, Any]], ...] = (
    (1, QWEN3, {}),
    (3, QWEN2_TIED, {}),
    (2, QWEN3, {"parallel": {"tp": 2}}),
    (4, QWEN3, {"parallel": {"cp": 2}, "distributed": _OVERLAP}),
    (2, QWEN2_TIED, {"parallel": {"pp": 2}}),
    (6, QWEN2_TIED, {"parallel": {"pp": 2}, "distributed": _OVERLAP}),
    (2, DEEPSEEK, {"parallel": {"ep": 2}}),
    (2, DEEPSEEK, {"parallel": {"tp": 2}}),
    (4, DEEPSEEK, {"parallel": {"tp": 2, "ep": 2, "etp": 1}, "distributed": _OVERLAP}),
    (2, DEEPSEEK | {"num_nextn_predict_layers": 0}, {"parallel": {"tp": 1, "etp": 2}}),
    (2, DEEPSEEK, {"parallel": {"pp": 2}}),
    (2, DEEPSEEK | {"num_nextn_predict_layers": 2}, {"parallel": {"pp": 2, "vpp": 2}}),
    (2, QWEN2_TIED, {"parallel": {"pp": 2}, "model": {"mtp": {"layers": 1}}}),
    (2, QWEN2_TIED, {"parallel": {"pp": 2, **_FIRST}}),
    (3, DEEPSEEK | {"num_hidden_layers": 5}, {"parallel": {"pp": 3, **_LAST}}),
    (2, DEEPSEEK | {"num_hidden_layers": 6}, {"parallel": {"pp": 2, "vpp": 2, **_FOUR, **_TWO}}),
    (3, DEEPSEEK | {"num_hidden_layers": 8}, {"parallel": {"pp": 3, "vpp": 2, **_FOUR}}),
    (2, QWEN2_TIED, {"parallel": _laid_out(2, "E|tt|t|tL")}),
    (2, QWEN2_TIED, {"parallel": _laid_out(2, "Ettt|tmL"), "model": {"mtp": {"layers": 1}}}),
    (4, DEEPSEEK, {"parallel": _laid_out(2, "Et|t|t|tmL"), "distributed": _OVERLAP}),
    (2, DEEPSEEK, {"parallel": _laid_out(2, "Et|t|tt|mL")}),
    (4, DEEPSEEK | {"num_nextn_predict_layers": 2}, {"parallel": _laid_out(4, "E|tt|ttmm|L")}),
    (8, DEEPSEEK | {"num_hidden_layers": 5}, {"parallel": _laid_out(4, "E|(t|)*5,m|L")}),
    (3, QWEN2_TIED, {"optimizer": {"name": "sgd"}}),
    (2, QWEN2_TIED, {"parallel": {"pp": 2}, "optimizer": {"name": "sgd", "sgd_momentum": 0.0}}),
    (4, DEEPSEEK, {"parallel": {"tp": 2, "ep": 2, "etp": 1}, "optimizer": {"name": "sgd"}}),
    (2, DEEPSEEK, {"parallel": {"ep": 2}, "optimizer": {"use_distributed_optimizer": False}}),
    (2, QWEN3, {"parallel": {"tp": 2}, "model": _ADAPTED}),
    (2, QWEN2_TIED, {"parallel": {"pp": 2}, "model": _ADAPTED, "distributed": _OVERLAP}),
    (4, DEEPSEEK, {"parallel": {"tp": 2, "ep": 2, "etp": 1}, "model": _LATENT}),
    (2, DEEPSEEK | {"num_nextn_predict_layers": 0}, {"parallel": {"tp": 1, "etp": 2}, "model": _LATENT}),
    (2, QWEN3, {"parallel": {"tp": 2}, "model": {"lora": {**_ADAPTED["lora"], **_DORA}}}),
    (
        4,
        DEEPSEEK,
        {"parallel": {"tp": 2, "ep": 2, "etp": 1}, "model": {"lora": {**_LATENT["lora"], **_DORA}}},
    ),
    (2, GPT_OSS, {"parallel": {"tp": 2, "etp": 1}}),
    (4, GPT_OSS, {"parallel": {"pp": 2, "ep": 2}, "distributed": _OVERLAP}),
    (2, QWEN3_NEXT, {"parallel": {"tp": 2}}),
    (4, QWEN3_NEXT, {"parallel": {"pp": 2, "ep": 2}, "distributed": _OVERLAP}),
    (2, SEEING, _TALK),
    (2, SEEING, {**_TALK, "parallel": {"tp": 2}}),
    (4, SEEING, {**_TALK, "parallel": {"pp": 2}, "distributed": _OVERLAP}),
)


def main() -> None:
    torch.set_num_threads(1)
    # Megatron makes gloo groups beside the others; a fake group stands for those too.
    real = dist.new_group
    dist.new_group = lambda *args, **keywords: real(*args, **keywords | {"backend": None})  # type: ignore[assignment]
    runtime = ready()
    import megatron.core

    release = Version(Version(megatron.core.__version__).base_version)
    seen, wrong = 0, []
    for world, config, sections in CASES:
        for dtype in ("bf16", "fp32"):
            model = {"config": config, "dtype": dtype} | sections.get("model", {})
            train = {"steps": 1, "global_batch_size": 12}
            recipe = job(config, **sections | {"model": model, "train": train})
            layout = build_rank_layout(recipe, world)
            if release < Version("0.13") and _breaks(recipe, layout):
                continue
            if release < Version("0.15") and recipe.architecture.sinks:
                continue
            if release < Version("0.16") and recipe.architecture.delta_net:
                continue
            if any(find_layout_string_problems(recipe, MegatronCode(release))):
                continue
            buffers = StateBuffers.from_recipe(recipe, layout, LOCAL_LAYER_TRAITS, MegatronCode(release))
            for rank in range(world):
                dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
                try:
                    wrong += [
                        f"{config['model_type']} {sections} {dtype} rank {rank}: {what}"
                        for what in compare(recipe, layout, buffers, rank, runtime)
                    ]
                finally:
                    dist.destroy_process_group()
                seen += 1
    print(json.dumps({"release": str(release), "ranks": seen, "wrong": wrong}))


def compare(recipe: Recipe, layout: RankLayout, buffers: StateBuffers, rank: int, runtime: Any) -> list[str]:
    """Every difference between one rank and its prediction."""
    from bundle.mcore import groups, optimization
    from bundle.mcore.gpt import build_transformer_config
    from bundle.models import gpt

    with runtime.megatron_calls():
        state = groups.create_model_parallel_groups(recipe.parallel, seed=recipe.seed, timeout_seconds=60)
        try:
            config = build_transformer_config(recipe, runtime.build_config_options(recipe))
            models = gpt.build_chunks(recipe, config, runtime, state)
            chunks = optimization.wrap_data_parallel(recipe, config, models)
            optimizer = optimization.build_optimizer(recipe, chunks)
            optimizer.step()
        finally:
            groups.destroy_model_parallel_groups()
    wrong = []
    for chunk, model in zip(layout.find_chunks(rank), models, strict=True):
        expected = [
            (tensor.name, tensor.shape)
            for tensor in list_parameters(recipe.architecture, recipe.parallel, chunk, LOCAL_LAYER_TRAITS)
        ]
        found = [
            (_in_the_whole_model(name, chunk), tuple(tensor.shape))
            for name, tensor in model.named_parameters()
            if not name.startswith("adapters.")
        ]
        wrong += [
            f"{ours} predicted, {theirs} found"
            for ours, theirs in zip(expected, found, strict=False)
            if ours != theirs
        ]
        wrong += (
            [] if len(expected) == len(found) else [f"{len(expected)} tensors predicted, {len(found)} found"]
        )
    predicted, measured = buffers.compute_rank_bytes(rank), allocated(chunks, optimizer)
    if predicted != measured:
        wrong.append(f"{predicted} predicted, {measured} found")
    return wrong


def _in_the_whole_model(name: str, chunk: ModelChunk) -> str:
    """A parameter's path with layers counted over all stages; older releases' name of an MTP layer."""
    name = name.replace("mtp_model_layer", "transformer_layer")
    return re.sub(r"^decoder\.layers\.(\d+)", lambda at: f"decoder.layers.{chunk.layers[int(at[1])]}", name)


def allocated(chunks: list[Any], optimizer: Any) -> StateBytes:
    """What megatron's wrapper and optimizer really hold."""
    buffers = [b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    # Without the distributed optimizer there is no buffer of parameters; each is a tensor of its own.
    divided = all(buffer.param_data is not None for buffer in buffers)
    held = [b.param_data for b in buffers] if divided else [p for c in chunks for p in c.parameters()]
    if divided:
        held = [*held, *(p for c in chunks for p in c.parameters() if not p.requires_grad)]
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    parts = [part for part in parts if not getattr(part, "is_stub_optimizer", False)]
    states = [
        (name, tensor)
        for part in parts
        for state in part.optimizer.state.values()
        for name, tensor in state.items()
    ]
    copies = "shard_fp32_from_float16_groups" if divided else "fp32_from_float16_groups"
    return StateBytes(
        parameters=sum(tensor.nbytes for tensor in held),
        gradients=sum(buffer.grad_data.nbytes for buffer in buffers),
        master=sum(t.nbytes for part in parts for group in getattr(part, copies, ()) for t in group),
        moments=sum(tensor.nbytes for name, tensor in states if name != "step" and tensor is not None),
        counters=sum(tensor.nbytes for name, tensor in states if name == "step"),
    )


def _breaks(recipe: Recipe, layout: RankLayout) -> bool:
    ranks = layout.find_axis_size("dp") * layout.find_axis_size("cp")
    of = functools.partial(list_parameters, recipe.architecture, recipe.parallel, traits=LOCAL_LAYER_TRAITS)
    return any(
        is_shared_embedding_across_buckets(of(chunk=chunk), ranks)
        for stage in layout.stages
        for chunk in stage
    )


if __name__ == "__main__":
    main()
