"""What a job's attention kernel, loss, FP8 products and optimizer keep, on a device and beside it."""

import math
from typing import Any

import pytest
import torch

from bundle.engine.scores import Head, score_labels
from bundle.environment.hardware import build_preset, detect
from bundle.environment.machine import DetectedValue
from bundle.planning import to_json, to_text
from tests.environment.machines import recorded
from tests.planning.jobs import DEEPSEEK, QWEN3, job, plan

NUMBERS = {"bf16": torch.bfloat16, "fp32": torch.float32}


def kept(compute) -> int:
    """Bytes of the storages that autograd saves, each once."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = compute()
    del result
    return sum(storage.nbytes() for storage in storages.values())


def planned(machine, *, config=QWEN3, model=None, **sections):
    recipe = job(config, model={"config": config, **(model or {})}, **sections)
    return plan(recipe, build_preset(machine), nodes=1, per_node=sections.get("parallel", {}).get("tp", 1))


def problems(machine, **sections):
    return [problem.text for problem in planned(machine, **sections).problems]


@pytest.mark.parametrize("config", [QWEN3, DEEPSEEK], ids=["queries", "latent"])
@pytest.mark.parametrize(("machine", "tp"), [("h200", 1), ("h200", 2), ("a3", 1)])
def test_unfused_attention_keeps_the_probabilities_of_all_pairs(machine, tp, config):
    rows, heads, width = 512, config["num_attention_heads"] // tp, 16
    config = config | {"max_position_embeddings": rows}  # of which there are more pairs than logits

    def attention():
        q, k, v = (
            torch.randn(2 * heads, rows, width, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"
        )
        return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)

    inputs = 3 * 2 * heads * rows * width * 2
    pairs = kept(attention) - inputs
    sections = {
        "data": {"sequence_length": rows, "packed": False},
        "train": {"micro_batch_size": 2, "global_batch_size": 4},
        "parallel": {"tp": tp, "sequence_parallel": tp > 1},
        "config": config,
    }
    flash, unfused = (
        planned(machine, model={"attention": kernel}, **sections).memory[0].activations
        for kernel in ("flash", "unfused")
    )
    layers = config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)
    assert unfused.saved - flash.saved == layers * pairs
    again = {"granularity": "selective", "modules": ["core_attn"]}
    flash, unfused = (
        planned(machine, model={"attention": kernel, "recompute": again}, **sections).memory[0].activations
        for kernel in ("flash", "unfused")
    )
    assert unfused.saved == flash.saved and unfused.transient == pairs > flash.transient


def test_torch_s_own_kernel_keeps_no_probabilities():
    recipes = [job(QWEN3, model={"config": QWEN3, "attention": of}) for of in ("flash", "unfused")]
    on = detect("cpu", recorded("cgroup-v1"))
    flash, unfused = (plan(recipe, on, nodes=1, per_node=1).memory[0].activations for recipe in recipes)
    assert flash == unfused


def test_a_gpu_computes_attention_in_fp32_unfused_and_its_plan_says_so():
    rows = {"data": {"sequence_length": 4096, "packed": False}}
    config = QWEN3 | {"max_position_embeddings": 4096}
    made = planned("h200", config=config, model={"dtype": "fp32"}, **rows)
    assert made.attention.value == "unfused"
    assert made.memory[0].activations.saved > 4 * 4 * 4096**2 * 4  # layers, heads, pairs


@pytest.mark.parametrize("dtype", NUMBERS)
def test_a_preference_keeps_the_logits_as_they_came(dtype):
    tokens, vocabulary = 24, 8192
    logits = torch.randn(tokens, 1, vocabulary, dtype=NUMBERS[dtype], requires_grad=True)
    seen = kept(lambda: score_labels(logits, torch.zeros(1, tokens, dtype=torch.long), None)) / (
        tokens * vocabulary
    )
    config = QWEN3 | {"vocab_size": vocabulary}
    rows = {"source": "jsonl", "path": ["rows.jsonl"], "tokenizer": "hf:none", "template": "chat"}
    data = rows | {"sequence_length": 64, "packed": False}
    sections = {"config": config, "model": {"dtype": dtype}, "data": data}
    sft, dpo = (
        planned("h200", task=task, train={"micro_batch_size": of_two, "global_batch_size": 4}, **sections)
        .memory[0]
        .activations
        for task, of_two in (("sft", 2), ("dpo", 1))  # a pair has two rows
    )
    entries = 2 * 64 * vocabulary
    assert (sft.saved - dpo.saved) / entries == pytest.approx(4 - seen, abs=0.02)
    # Of cross-entropy the logits and their copy in fp32, here the gradient.
    size = NUMBERS[dtype].itemsize
    assert (sft.transient / entries, dpo.transient / entries) == ((6, 2) if size == 2 else (4, 4))


def test_fp8_products_keep_their_weights_by_rows_and_by_columns():
    made = planned("h200", model={"fp8": {"scaling": "blockwise"}})
    heads, groups, width, hidden, ffn = 4, 2, 16, 64, 96
    layer = (heads + 2 * groups) * width * hidden + heads * width * hidden + 3 * hidden * ffn
    assert made.memory[0].states.quantized == 4 * layer * 2
    assert planned("h200").memory[0].states.quantized == 0
    without = planned("h200").memory[0].states
    assert made.memory[0].states.device_total - without.device_total == 4 * layer * 2
    assert "their FP8 copies" in to_text(made, "run", "starts")


def test_what_is_offloaded_must_fit_the_host_of_a_node(messages):
    recipe = job(QWEN3, optimizer={"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True})
    machine = build_preset("h200", 2)
    needed = 2 * plan(recipe, machine, nodes=1, per_node=2).memory[0].states.host
    for room, refused in ((needed - 1, True), (needed, False), (math.inf, False)):
        host = machine.host._replace(memory=DetectedValue(room, "a test"))
        made = plan(recipe, machine._replace(host=host), nodes=1, per_node=2)
        found = [problem.text for problem in made.problems if "host" in problem.text]
        assert len(found) == refused
        for text in found:
            messages(text)


def test_sgd_without_momentum_is_refused_where_it_keeps_one():
    plain = {"optimizer": {"name": "sgd", "sgd_momentum": 0}}
    assert any(text.startswith("optimizer.sgd_momentum: 0") for text in problems("h200", **plain))
    assert not problems("a3", **plain)
    assert not problems("h200", optimizer={"name": "sgd", "sgd_momentum": 0.5})


@pytest.mark.parametrize("adapters", [None, {"rank": 4, "alpha": 8, "targets": ["q_proj"]}])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("length", [16384, 65536], ids=["all kept", "some kept"])
def test_a_loss_of_many_logits_keeps_its_input_and_the_logits_of_first_tokens(length, tp, adapters):
    hidden, vocabulary = 64, 76032
    first, chunk = (logits * tp // vocabulary // 128 * 128 for logits in (2**31, 2**29))
    first = min(first, length)
    width, few_tokens = vocabulary // tp, 64
    weight = torch.randn(width, hidden, dtype=torch.bfloat16, requires_grad=adapters is None)
    states = torch.randn(few_tokens, 1, hidden, dtype=torch.bfloat16, requires_grad=True)
    labels, head = torch.zeros(1, few_tokens, dtype=torch.long), Head(weight, 16, width, kept_tokens=24)
    seen = kept(lambda: score_labels(states, labels, None, None, head)) - weight.nbytes - 24 * width * 2
    sections: dict[str, Any] = {
        "config": QWEN3 | {"max_position_embeddings": length},
        "model": {"lora": adapters},
        "data": {"sequence_length": length, "packed": True},
        "train": {"micro_batch_size": 1, "global_batch_size": 1},
        "parallel": {"tp": tp, "sequence_parallel": tp > 1},
    }
    few, many = (
        planned("h200", **sections | {"config": sections["config"] | {"vocab_size": size}})
        for size in (512, vocabulary)
    )
    # With few words the loss keeps its softmax, and its input unless the weight is frozen.
    small = 512 // tp * 4 + (0 if adapters else hidden * 2 // tp)
    grows = many.memory[0].activations.saved - few.memory[0].activations.saved
    assert grows == length * (seen // few_tokens - small) + first * width * 2
    # Forward the logits of a chunk; backward the gradients of the input and the weight.
    gradients = length * hidden * 2 + (0 if adapters else weight.nbytes)
    # What a frozen embedding gives, and its gradient.
    embedding = 2 * length // tp * hidden * 2 if adapters else 0
    logits = min(chunk, length - first) * width * 2
    assert many.memory[0].activations.transient == max(logits, gradients) + embedding
    assert to_json(many)["loss"] == {"kept_tokens": first, "chunk_tokens": chunk}
    assert to_json(few)["loss"] == {"kept_tokens": None, "chunk_tokens": None}
    line = f"the logits of {first:,} tokens"
    assert (line in to_text(many, "run", "starts")) == (first < length)
    assert line not in to_text(few, "run", "starts")
