"""The gated delta net over two tensor-parallel ranks that hold the whole sequence each."""

from typing import Any

import torch

from bundle.mcore.attention import gated_delta_net
from bundle.verification.bench import Bench
from bundle.verification.numbers import gap
from bundle.verification.tiny import DENSE, chunk


def output_norm(bench: Bench) -> float:
    """The gradient of the norm that all heads share, against the sum over the heads of all ranks.

    By the formula of a weight that multiplies what has a mean square of 1.
    """
    with bench.layout(tp=2) as groups:
        config = chunk(bench, groups, DENSE).config
        layer = gated_delta_net(config).to(bench.device)
        seen: list[torch.Tensor] = []

        def keep(_module: Any, given: Any, output: torch.Tensor) -> None:
            seen.append(given[0].detach())
            output.register_hook(seen.append)

        layer.out_norm.register_forward_hook(keep)
        generator = torch.Generator().manual_seed(6)
        hidden, towards = torch.randn(2, 12, 2, config.hidden_size, generator=generator).to(bench.device)
        (layer(hidden, None)[0] * towards).sum().backward()
        given, arrived = seen
        scale = (given.square().mean(-1, keepdim=True) + config.layernorm_epsilon).rsqrt()
        reference = (arrived * given * scale).sum(0)
        torch.distributed.all_reduce(reference, group=groups.tp.group)
        return gap({"weight": layer.out_norm.weight.grad}, {"weight": reference})
