"""Computes what a server must report for a version; runs as a script with the server's Python.

A line on stdin is {"directory", "names"}, or {"bucket"} for each bucket and then {"names"}; the answer is
{"checksums"}, {} for a bucket, or {"error"}. The hash is SGLang's own, on the kind of device that the server
has. It imports nothing of this package, and ends with the process that started it.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

# Tensors that SGLang joins along their rows, by the published ones; on one rank, where nothing is cut.
_PARTS_BY_JOINED_NAME = {
    ".qkv_proj.": (".q_proj.", ".k_proj.", ".v_proj."),
    ".gate_up_proj.": (".gate_proj.", ".up_proj."),
    ".fused_qkv_a_proj_with_mqa.": (".q_a_proj.", ".kv_a_proj_with_mqa."),
}
_DRAFT_PREFIX = "draft."
_EXPERT_TENSOR_PARTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
_PADDED_VOCABULARY_TENSORS = ("embed_tokens.weight", "lm_head.weight")
_VOCABULARY_MULTIPLE = 64  # SGLang adds rows of zeros


def list_parts(name: str, published: dict[str, Any]) -> list[list[str]] | None:
    """Return the published names that a tensor of the server is made of; None where that is not known.

    The outer list is a stack, of experts; each inner one is joined along the rows.
    """
    if name in published:
        return [[name]]
    for joined, parts in _PARTS_BY_JOINED_NAME.items():
        if joined in name:
            names = [name.replace(joined, part) for part in parts]
            return [names] if all(part in published for part in names) else None
    base, _, kind = name.rpartition(".")
    if base.endswith(".experts") and kind in _EXPERT_TENSOR_PARTS:
        pattern = re.compile(re.escape(base) + r"\.(\d+)\.")
        numbers = sorted({int(match[1]) for match in map(pattern.match, published) if match})
        stack = [
            [f"{base}.{number}.{part}.weight" for part in _EXPERT_TENSOR_PARTS[kind]] for number in numbers
        ]
        return stack if stack and all(part in published for names in stack for part in names) else None
    return None


def list_published_draft_parts(name: str, published: dict[str, Any]) -> list[list[str]] | None:
    """Return what `list_parts` returns for a tensor of the draft, without `draft.` in its name.

    The files have the draft of DeepSeek and GLM as one more layer. Embedding and head are the target's.
    """
    suffix = ".eh_proj.weight"
    layer = next((key.removesuffix(suffix) for key in published if key.endswith(suffix)), "")
    in_layer = re.sub(r"^model\.(decoder\.)?", f"{layer}.", name)
    return list_parts(in_layer, published) or list_parts(name, published)


def open_files(directory: Path) -> dict[str, Callable[[], Any]]:
    """Return what reads each published tensor of the files in a directory."""
    from safetensors import safe_open

    files = [safe_open(path, "pt") for path in sorted(directory.glob("*.safetensors"))]
    return {name: partial(file.get_tensor, name) for file in files for name in file.keys()}  # noqa: SIM118


def copy_bucket(payload: str) -> dict[str, Callable[[], Any]]:
    """Return what reads each tensor of a bucket: its copy on the host, for the bucket is freed soon."""
    from sglang.srt.utils import MultiprocessingSerializer

    content = MultiprocessingSerializer.deserialize(payload)
    values = content["flattened_tensor"].cpu().clone()
    return {
        place.name: partial(values[place.start_idx : place.end_idx].view(place.dtype).reshape, place.shape)
        for place in content["metadata"]
    }


def predict_server_checksums(
    published: dict[str, Callable[[], Any]], names: list[str]
) -> Iterator[tuple[str, str]]:
    """Yield name and checksum of each tensor of the server whose parts are known."""
    import torch
    from sglang.srt.managers.mm_utils import tensor_hash

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in names:
        in_draft = name.startswith(_DRAFT_PREFIX)
        stack = (list_published_draft_parts if in_draft else list_parts)(
            name.removeprefix(_DRAFT_PREFIX), published
        )
        if stack is None:
            continue
        rows = [torch.cat([published[part]().to(device) for part in parts]) for parts in stack]
        tensor = rows[0] if len(stack) == 1 and ".experts." not in name else torch.stack(rows)
        if name.endswith(_PADDED_VOCABULARY_TENSORS) and (missing := -len(tensor) % _VOCABULARY_MULTIPLE):
            tensor = torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:])))
        yield name, f"{tensor_hash(tensor):016x}"


def main() -> None:
    received: dict[str, Callable[[], Any]] = {}
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)  # what is imported may print
        for line in sys.stdin:
            task = json.loads(line)
            reply: dict[str, Any] = {}
            try:
                if "bucket" in task:
                    received |= copy_bucket(task["bucket"])
                else:
                    directory = task.get("directory")
                    published = open_files(Path(directory)) if directory else received
                    reply["checksums"] = dict(predict_server_checksums(published, task["names"]))
                    received = {}
            except Exception as error:  # noqa: BLE001 - whatever it is, it is told
                reply = {"error": f"{type(error).__name__}: {error}"[:300]}
            print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
