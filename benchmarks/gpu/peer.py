"""Trains a model of a Hugging Face directory by transformers and torch alone: what `peers` compares us with.

python -m benchmarks.gpu.peer CASE.json VARIANT SIZE RECOMPUTE STARTED

Weights are in bf16, as ours are. torch's fused AdamW updates fp32 copies of them with fp32 states, and
gradients of micro-batches add up in fp32. SIZE is the micro-batch, RECOMPUTE 0 or 1. STARTED is the time at
which the program started [s since 1970]. Prints a line of JSON: losses [nats], the times between the ends of
steps [s], seconds from STARTED to the end of the first step, and peak bytes. Ends with 3 where the memory is
too small.
"""

import importlib
import json
import sys
import time
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional

DPO_BETA = 0.1
OUT_OF_MEMORY = 3


def main() -> int:
    """Train the case."""
    case, variant = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), sys.argv[2]
    size, recompute, started = int(sys.argv[3]), sys.argv[4] == "1", float(sys.argv[5])
    try:
        print(json.dumps(train(case, variant, size, recompute=recompute, started=started)))
    except RuntimeError as error:
        if "out of memory" not in str(error).lower() and "ALLOC_FAILED" not in str(error):
            raise
        return OUT_OF_MEMORY
    return 0


def train(
    case: dict[str, Any], variant: str, size: int, *, recompute: bool, started: float
) -> dict[str, Any]:
    """Return what `main` prints."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = build_model(case, variant, device)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if variant == "compiled":
        model.forward = torch.compile(model.forward)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    masters = add_fp32_masters(weights)
    is_fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(masters, lr=case["lr"], betas=(0.9, 0.95), weight_decay=0.1, fused=is_fused)
    batches = list(islice(read_batches(case), case["steps"]))
    if case["task"] == "dpo":  # the reference model is the first one
        for batch in batches:
            batch["base"] = score_pairs(case, model, batch, size, device)
    losses, ends = [], []
    for batch in batches:
        total = torch.zeros((), device=device)
        for part in split_batch(batch, case["sequences"] // size, device):
            loss = compute_loss(case, model, part) * size / case["sequences"]
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        losses.append(total.item())  # waits for the device
        ends.append(time.time())
    return {
        "losses": losses,
        "seconds": [after - before for before, after in pairwise(ends)],
        "first_step_seconds": ends[0] - started,
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
    }


def build_model(case: dict[str, Any], variant: str, device: torch.device) -> Any:
    """Return the model of the case's directory, with adapters if the case has them."""
    kind: Any = transformers.AutoModelForCausalLM
    if case["task"] == "vision":
        kind = transformers.AutoModelForImageTextToText
    elif variant == "liger":
        kind = importlib.import_module("liger_kernel.transformers").AutoLigerKernelForCausalLM
    if variant == "compiled":  # nothing is padded, and a mask would exclude the flash kernel
        transformers.AttentionMaskInterface.register("sdpa", lambda *_, **__: None)
    with torch.device(device):
        model = kind.from_pretrained(case["model"], dtype=torch.bfloat16, attn_implementation="sdpa")
    model.to(device).train()
    model.config.use_cache = False
    if case["task"] == "lora":
        peft = importlib.import_module("peft")
        setting = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, setting, autocast_adapter_dtype=False)
        model.enable_input_require_grads()
    return model


def add_fp32_masters(weights: list[Tensor]) -> list[Tensor]:
    """Return an fp32 copy of each weight, whose gradient collects the weight's gradients."""
    masters = []
    for weight in weights:
        master = weight.detach().float().requires_grad_()
        master.grad = torch.zeros_like(master)

        def move_gradient(source: Tensor, gradient: Tensor = master.grad) -> None:
            assert source.grad is not None
            gradient.add_(source.grad)
            source.grad = None

        weight.register_post_accumulate_grad_hook(move_gradient)
        masters.append(master)
    return masters


def read_batches(case: dict[str, Any]) -> Iterator[dict[str, Tensor]]:
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
            batch["pixels"] = torch.rand(sequences, rows_of_pixels, image["width"], generator=draw).bfloat16()
        yield batch


def split_batch(batch: dict[str, Tensor], count: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Yield that many micro-batches on the device."""
    parts = {name: tensor.chunk(count) for name, tensor in batch.items()}
    for number in range(count):
        yield {name: tensors[number].to(device) for name, tensors in parts.items()}


def compute_loss(case: dict[str, Any], model: Any, part: dict[str, Tensor]) -> Tensor:
    """Return the mean loss of a micro-batch in nats: of next tokens, or of pairs (DPO)."""
    ids = part["ids"]
    if case["task"] == "dpo":
        log_ratios = (sum_log_probs(model, ids, case["prompt_length"]) - part["base"]).view(-1, 2)
        return -functional.logsigmoid(DPO_BETA * (log_ratios[:, 0] - log_ratios[:, 1])).mean()
    if case["task"] == "vision":
        image = case["image"]
        grids = torch.tensor([image["grid"]] * len(ids), device=ids.device)
        kinds = (ids == image["token_id"]).int()
        labels = ids.clone()
        labels[:, : case["prompt_length"]] = -100
        pixels = part["pixels"].flatten(0, 1)
        result = model(ids, labels=labels, pixel_values=pixels, image_grid_thw=grids, mm_token_type_ids=kinds)
    else:
        result = model(ids, labels=ids)
    loss: Tensor = result.loss
    return loss


def score_pairs(
    case: dict[str, Any], model: Any, batch: dict[str, Tensor], size: int, device: torch.device
) -> Tensor:
    """Return the sum of the log-probabilities of each response [rows], on the host."""
    with torch.no_grad():
        parts = split_batch(batch, case["sequences"] // size, device)
        return torch.cat([sum_log_probs(model, part["ids"], case["prompt_length"]).cpu() for part in parts])


def sum_log_probs(model: Any, ids: Tensor, prompt_length: int) -> Tensor:
    """Return the sum of the log-probabilities of each row's response [rows], in fp32."""
    logits = model(ids).logits[:, prompt_length - 1 : -1].flatten(0, 1).float()
    losses = functional.cross_entropy(logits, ids[:, prompt_length:].flatten(), reduction="none")
    return -losses.view(len(ids), -1).sum(1)


if __name__ == "__main__":
    sys.exit(main())
