"""Weight gradients that products add themselves: those of a model whose gradients are added afterwards."""

from dataclasses import replace
from typing import Any
from unittest import mock

from bundle.backends.cuda.weight_gradients import EXTENSION_NAME, add_weight_gradient
from bundle.verification.numbers import DENSE_HF_CONFIG, Bench, find_worst, measure_gap
from tests.engine.experiments import EVEN, engine, gradients, micro_batches, recipe
from tests.engine.reference import computed, texts

DEPTHS = 1


class Accumulating:
    """The runtime, with the field of megatron's config."""

    def __init__(self, runtime: Any):
        self.runtime = runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runtime, name)

    def build_config_options(self, job: Any) -> dict[str, Any]:
        return {**self.runtime.build_config_options(job), "gradient_accumulation_fusion": True}


def accumulated(bench: Bench, parallel: dict[str, int], *, tied: bool) -> float:
    """The largest distance of any gradient; infinite if megatron added none through our product."""
    from megatron.core.tensor_parallel import layers

    config = DENSE_HF_CONFIG | {"tie_word_embeddings": tied}
    whole = computed(bench, config, texts(EVEN), depths=DEPTHS, scale=0.1)
    added = mock.Mock(side_effect=add_weight_gradient)
    job = recipe(config, parallel, packed=False, layers=DEPTHS)
    with (
        mock.patch.object(layers, EXTENSION_NAME, mock.Mock(wgrad_gemm_accum_fp32=added), create=True),
        mock.patch.object(layers, "_grad_accum_fusion_available", new=True),
        engine(replace(bench, runtime=Accumulating(bench.runtime)), job) as made,
    ):
        made.forward_backward(micro_batches(made, texts(EVEN), "rows", "token"))
        here = gradients(made)
    if not added.called:
        return float("inf")
    return measure_gap(
        {name: value for name, (value, _) in here.items()},
        {name: part(whole[name]) for name, (_, part) in here.items()},
    )


def everywhere(bench: Bench) -> float:
    """Heads of their own and tied ones, which the MTP layer uses, too; over stages and tensor ranks."""
    layouts: tuple[dict[str, int], ...] = ({}, {"tp": 2}, {"pp": 2})
    return find_worst([accumulated(bench, layout, tied=tied) for layout in layouts for tied in (False, True)])
