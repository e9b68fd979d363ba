"""Where gradient buffers put parameters: `python -m tests.replacements.buffers PATCHED < cases`.

Reads a JSON list of (data-parallel size, bucket size, sizes of parameters, index of the shared one), in the
order of the backward pass, and writes (first element, last, bucket) of each parameter, and the buckets.
"""

import json
import sys
from typing import Any

import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from bundle import backends


def main(patched: bool, cases: list[Any]) -> None:
    runtime = backends.set_up_runtime("cpu")
    from megatron.core import parallel_state

    found: dict[int, Any] = {}
    with runtime.megatron_calls():
        for ranks in {case[0] for case in cases}:
            torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
            parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
            found |= {i: _places(patched, *case) for i, (size, *case) in enumerate(cases) if size == ranks}
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()
    json.dump([found[i] for i in range(len(cases))], sys.stdout)


def _places(patched: bool, bucket_size: int | None, sizes: list[int], shared: int) -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer

    from bundle.mcore import filter_keywords
    from bundle.replacements import gradients

    backward = [torch.nn.Parameter(torch.full((size,), float(i))) for i, size in enumerate(sizes)]
    vars(backward[shared])["shared_embedding"] = True
    initialize = _ParamAndGradBuffer.__init__
    if patched:
        initialize = gradients.pad_before_embedding_bucket(initialize)
    group = torch.distributed.group.WORLD
    buffer = object.__new__(_ParamAndGradBuffer)
    initialize(
        buffer,
        DistributedDataParallelConfig(use_distributed_optimizer=True),
        torch.float32,
        torch.float32,
        backward[::-1],
        group,
        bucket_size,
        {p: str(i) for i, p in enumerate(backward)},
        1.0,
        list(range(len(sizes))),
        **filter_keywords(_ParamAndGradBuffer.__init__, nccl_ub=False),
    )
    assert type(buffer) is _ParamAndGradBuffer
    assert buffer.data_parallel_world_size == torch.distributed.get_world_size(group)
    assert all((p == i).all() for i, p in enumerate(backward)), "a weight has changed"
    return [buffer.param_index_map[p] for p in backward], buffer.bucket_indices


if __name__ == "__main__":
    main(sys.argv[1] == "patched", json.load(sys.stdin))
