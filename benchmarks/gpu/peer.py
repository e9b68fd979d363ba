"""Trains a model of a Hugging Face directory by transformers and torch alone: what `peers` compares us with.

python -m benchmarks.gpu.peer CASE.json VARIANT

Weights are in fp32 and products in bf16 (autocast), as our engine computes; frozen weights are in bf16. AdamW
is torch's fused one, with fp32 states. The largest micro-batch that fits is taken; if one sequence does not
fit, layers are recomputed. Prints one line of JSON: losses [nats], seconds of each step, seconds from the
start of the process to the end of the first step, peak bytes, micro-batch size, and whether layers are
recomputed.
"""

import copy
import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional

STARTED = time.time()
DPO_BETA = 0.1


def main() -> int:
    """Train the case; return 1 where nothing fits."""
    case, variant = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), sys.argv[2]
    sizes = [case["sequences"] >> shift for shift in range(case["sequences"].bit_length())]
    for recompute in (False, True):
        for size in sizes:
            try:
                print(json.dumps(train(case, variant, size, recompute=recompute)))
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
            else:
                return 0
    print("one sequence does not fit into the memory", file=sys.stderr)
    return 1


def train(case: dict[str, Any], variant: str, size: int, *, recompute: bool) -> dict[str, Any]:
    """Return what `main` prints, of a run with that micro-batch size."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = build_model(case, variant, device)
    reference = (
        copy.deepcopy(model).to(torch.bfloat16).requires_grad_(False) if case["task"] == "dpo" else None
    )
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if variant == "compiled":
        model.forward = torch.compile(model.forward)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    is_fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(weights, lr=case["lr"], betas=(0.9, 0.95), weight_decay=0.1, fused=is_fused)
    losses, seconds, first = [], [], 0.0
    for step, batch in enumerate(read_batches(case, device)):
        began = time.monotonic()
        total = torch.zeros((), device=device)
        for part in split_batch(batch, case["sequences"] // size):
            with torch.autocast(device.type, torch.bfloat16):
                loss = compute_loss(case, model, reference, part) * size / case["sequences"]
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())  # waits for the device
        seconds.append(time.monotonic() - began)
        first = first or time.time() - STARTED
        if step + 1 == case["steps"]:
            break
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {
        "losses": losses, "seconds": seconds, "first_step_seconds": first, "peak_bytes": peak,
        "micro_batch_size": size, "recompute": recompute,
    }  # fmt: skip


def build_model(case: dict[str, Any], variant: str, device: torch.device) -> Any:
    """Return the model of the case's directory, with adapters if the case has them."""
    kind: Any = transformers.AutoModelForCausalLM
    if case["task"] == "vision":
        kind = transformers.AutoModelForImageTextToText
    elif variant == "liger":
        kind = importlib.import_module("liger_kernel.transformers").AutoLigerKernelForCausalLM
    dtype = torch.bfloat16 if case["task"] == "lora" else torch.float32
    with torch.device(device):
        model = kind.from_pretrained(case["model"], dtype=dtype, attn_implementation="sdpa")
    model.to(device).train()
    model.config.use_cache = False
    if case["task"] == "lora":
        peft = importlib.import_module("peft")
        setting = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, setting)  # PEFT keeps adapters in fp32
        model.enable_input_require_grads()
    return model


def read_batches(case: dict[str, Any], device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Yield the batch of each step: ids [sequences, length]; of pairs twice the rows; with pixels."""
    draw = torch.Generator().manual_seed(1)
    letters = torch.tensor(case["ids"])
    length, sequences = case["sequence_length"], case["sequences"]
    rows = sequences * (2 if case["task"] == "dpo" else 1)
    while True:
        ids = letters[torch.randint(len(letters), (rows, length), generator=draw)]
        batch = {"ids": ids}
        if case["task"] == "vision":
            image = case["image"]
            ids[:, 1 : 1 + image["tokens"]] = image["token_id"]
            ids[:, 0], ids[:, 1 + image["tokens"]] = image["start_id"], image["end_id"]
            rows_of_pixels = image["grid"][1] * image["grid"][2]
            batch["pixels"] = torch.rand(sequences, rows_of_pixels, image["width"], generator=draw)
        yield {name: tensor.to(device) for name, tensor in batch.items()}


def split_batch(batch: dict[str, Tensor], count: int) -> Iterator[dict[str, Tensor]]:
    """Yield that many micro-batches."""
    parts = {name: tensor.chunk(count) for name, tensor in batch.items()}
    for number in range(count):
        yield {name: tensors[number] for name, tensors in parts.items()}


def compute_loss(case: dict[str, Any], model: Any, reference: Any, part: dict[str, Tensor]) -> Tensor:
    """Return the mean loss of a micro-batch in nats: of next tokens, or of pairs (DPO)."""
    ids = part["ids"]
    if case["task"] == "dpo":
        log_probs = sum_log_probs(model, ids, case["prompt_length"])
        with torch.no_grad():
            base = sum_log_probs(reference, ids, case["prompt_length"])
        margins = (log_probs - base).view(-1, 2)
        return -functional.logsigmoid(DPO_BETA * (margins[:, 0] - margins[:, 1])).mean()
    if case["task"] == "vision":
        image = case["image"]
        grids = torch.tensor([image["grid"]] * len(ids), device=ids.device)
        kinds = (ids == image["token_id"]).int()
        labels = ids.masked_fill(kinds.bool(), -100)
        pixels = part["pixels"].flatten(0, 1)
        result = model(ids, labels=labels, pixel_values=pixels, image_grid_thw=grids, mm_token_type_ids=kinds)
    else:
        result = model(ids, labels=ids)
    loss: Tensor = result.loss
    return loss


def sum_log_probs(model: Any, ids: Tensor, prompt_length: int) -> Tensor:
    """Return the sum of the log-probabilities of each row's response [rows], in fp32."""
    logits = model(ids).logits[:, prompt_length - 1 : -1].float()
    return -functional.cross_entropy(logits.transpose(1, 2), ids[:, prompt_length:], reduction="none").sum(1)


if __name__ == "__main__":
    sys.exit(main())
