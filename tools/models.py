"""docs/models.md, made from what runs have shown: `python -m tools.models > docs/models.md`."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from packaging.version import Version

from bundle.architectures import SUPPORTED_FAMILIES
from bundle.architectures.published_names import PUBLISHED_NAMES
from bundle.environment.packages import MegatronCode
from bundle.planning.problems import find_missing_feature
from tools.markdown import table

RECORD = Path(__file__).parents[1] / "tests" / "families" / "record.json"
EVERY = "every release"  # of what no megatron-core takes part in
_INTRODUCTION = """\
# Models

This page lists the families of models that can be read from the Hub, trained and exported, and what runs have
shown of each. It is made by `python -m tools.models > docs/models.md` from tests/families/record.json, which
tests write.

Every family is tested with tiny models of random weights. Every config field has unusual values, no weight of
a normalisation layer is one, and no bias is zero. All kinds of RoPE scaling are tested, with the keys of
transformers 4 and 5. A number is the largest difference that was seen, in fp32 on the cpu backend:

- config: changing a field changes the results, or the field is refused by name. Unknown fields are refused by
  name, too.
- forward: log-probabilities, entropies and loss [nats] against transformers' own class
- gradients: those of one step against transformers', relative to the largest number of each tensor
- import: log-probabilities against transformers', of a directory that transformers wrote, loaded as by
  `train`
- tp2 + SP, pp2, ep2, packed cp2: as import, but on two ranks, with tensor and sequence parallelism, two
  stages, divided experts, or divided packs
- export: transformers opens the written model without missing or unknown tensors, and computes the same.
  Every published tensor is the same, bit for bit.
- FP8: an export in blocks of FP8 (`checkpoint.export: hf-fp8`). The values times their scales are compared
  with the weights, relative to the largest weight of each block. Half a step, 0.036, is the limit.
- LoRA: log-probabilities, gradients and their norm, a step and a resumed run, against transformers with
  PEFT's adapters, in every layout; PEFT opens the exported adapters
- MTP: multi-token prediction, imported from the family's own names and exported under them. Its losses are
  compared with those of a plain model on one rank, at tp 2, over uneven and interleaved stages, and at
  tp 2 x ep 2.

A cell with "from" has the first release that supports the family; a plan for an earlier release is refused by
name. "Not run" means that no run is recorded for the release. `make releases` tests the cells with "from",
and fails if an earlier release would do. FP8 of models that see images was never tested.

gpt-oss needs `parallel.etp: 1`. On cuda, mcore-bundle also requires `data.packed: false` and
`parallel.cp: 1`. Transformer Engine up to 2.11 does not support gpt-oss' attention sinks with packs, and
supports them with context parallelism only by all-to-all. Transformer Engine 2.12 also supports them with
packs, but this was not run, so mcore-bundle refuses gpt-oss with packs for every release.

gpt-oss was run only on the cpu. Its experts are read in MXFP4, as published, and written in bf16. Their
values are those that transformers computes from MXFP4.

Qwen3-Next and the text models of Qwen3.5 have Gated DeltaNet layers:

- These models need unpacked rows (`data.packed: false`) and `parallel.cp: 1`. Adapters, FP8, megatron's own
  checkpoints (`weights`) and NPUs are refused.
- By default torch computes the layers, which is slow and needs more memory; a plan counts this memory. These
  layers were also run on an H200 (`benchmarks.gpu.pretrained`).
- If flash-linear-attention is installed on cuda, its kernels compute the layers; this was never tested here.
- The MTP layers of these models (`mtp.` in files) are neither read nor written, as in transformers.

A model that sees images is tested on texts with several images of unequal sizes. The gradients include those
of the tower and of the projector, in every layout. Either part can be frozen, or have its own learning rate
(`model.vision`). All experts of a layer of Qwen3-VL-MoE are one tensor. This tensor is read in the Hub's form
and in that of transformers 5, and written in the Hub's form.
"""
MODELS = {
    "llama": "Llama 2, 3.1, 3.2, 3.3",
    "mistral": "Mistral without its window",
    "mixtral": "Mixtral 8x7B, 8x22B",
    "qwen2": "Qwen2, Qwen2.5",
    "mimo": "MiMo-7B",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "deepseek_v2": "DeepSeek-V2-Lite, DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3, R1, Moonlight",
    "kimi_k2": "Kimi-K2",
    "glm4_moe": "GLM-4.5, GLM-4.5-Air",
    "gpt_oss": "gpt-oss-20b, 120b",
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_text": "Qwen3.5, its text model",
    "qwen3_5_moe_text": "Qwen3.5-MoE, its text model",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_vl_moe": "Qwen3-VL-MoE",
}
_LAYOUTS = {
    "one process": "import",
    "tp2 and sequence parallel": "tp2 + SP",
    "pp2": "pp2",
    "ep2": "ep2",
    "packed cp2": "packed cp2",
}
_HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # some layers are gated delta nets
_DENSE = ("llama", "mistral", "qwen2", "mimo", "qwen3", "qwen2_5_vl", "qwen3_vl", "qwen3_5_text")
# A cell of several runs is there when all of them are.
_MTP = ("MTP rows", "MTP tp", "MTP pp", "MTP vpp")
_MTP_OF_EXPERTS = "MTP tp ep"
_LORA = ("LoRA one process", "LoRA recomputed pp2", "LoRA tp2 and sequence parallel", "LoRA packed cp2")
# Whose linear layers are those of another family, which was run with adapters in their place.
_LORA_AS = {
    "mistral": "llama",
    "mixtral": "qwen3_moe",
    "mimo": "qwen2",
    "qwen3": "qwen2",
    "deepseek_v2": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "glm4_moe": "qwen3_moe",
    "gpt_oss": "qwen2",
}
_NOT_RUN, _NO = "not run", "refused"
Seen = dict[str, float]


def markdown() -> str:
    """The whole page."""
    record: dict[str, dict[str, Seen]] = json.loads(RECORD.read_text())
    releases = sorted((release for release in record if release != EVERY), key=Version)
    parts = [_INTRODUCTION]
    for release in reversed(releases):
        parts += [f"## megatron-core {release}\n", table(_HEAD, _rows(release, record))]
    return "\n".join([*parts, _REFUSED])


_RUN = ("forward", "gradients", *_LAYOUTS.values(), "export", "FP8", "LoRA", "MTP")
_HEAD = ("family", "models", "config", *_RUN)
_REFUSED = """\
## Not supported

Any other `model_type` is refused before anything starts, also Qwen3.5 with its vision tower. Some features
are refused in the families above too. The error names their config key:

- sliding-window attention, and a bias in o_proj (except for gpt-oss)
- biases in dense feed-forward layers
- M-RoPE in text-only models
- RoPE scaling other than linear, llama3 and yarn

Models that see images are refused if their weights are in FP8 or they have MTP layers.
"""


def _rows(release: str, record: dict[str, dict[str, Seen]]) -> Iterator[list[str]]:
    code = MegatronCode(Version(release))
    for family in SUPPORTED_FAMILIES:
        config = _cell(record[EVERY].get(family, {}), "config", shown=lambda _: "every field")
        lacks = find_missing_feature(family, code)
        cells = (
            [f"from {lacks.predicate.since}"] * len(_RUN)
            if lacks
            else run(family, record[release].get(family, {}))
        )
        yield [f"`{family}`", MODELS[family], config, *cells]


def run(family: str, own: Seen) -> list[str]:
    """The cells of what a release has shown of a family."""
    return [
        _cell(own, "forward"),
        _cell(own, "gradients"),
        *(_layout(family, own, layout) for layout in _LAYOUTS),
        _cell(own, "exported", shown=lambda _: "the same"),
        _in_fp8(family, own),
        _adapted(family, own),
        _prediction(family, own),
    ]


def _cell(own: Seen, what: str, shown: Callable[[float], str] = lambda value: f"{value:.0e}") -> str:
    return shown(own[what]) if what in own else _NOT_RUN


def _layout(family: str, own: Seen, layout: str) -> str:
    if layout == "packed cp2" and family in _HYBRID:
        return _NO
    return "no experts" if layout == "ep2" and family in _DENSE else _cell(own, layout)


def _in_fp8(family: str, own: Seen) -> str:
    if family in _HYBRID:
        return _NO
    return "stacked experts" if PUBLISHED_NAMES[family].stacked_experts else _cell(own, "FP8")


def _adapted(family: str, own: Seen) -> str:
    if family in _HYBRID:
        return _NO
    if family in _LORA_AS:
        return f"as `{_LORA_AS[family]}`"
    return _all(own, *(_LORA if PUBLISHED_NAMES[family].vision_prefix else ("LoRA",)))


def _prediction(family: str, own: Seen) -> str:
    if PUBLISHED_NAMES[family].ignored_prefix:
        return "left out"
    if PUBLISHED_NAMES[family].mtp is None:
        return "none published"
    return _all(own, *_MTP, *(() if family in _DENSE else (_MTP_OF_EXPERTS,)))


def _all(own: Seen, *runs: str) -> str:
    """The largest of what these runs have shown, if none is missing."""
    return f"{max(own[run] for run in runs):.0e}" if own.keys() >= set(runs) else _NOT_RUN


if __name__ == "__main__":
    print(markdown(), end="")
