"""What a model answers, by transformers' own class: token ids and what they show in, token ids out."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bundle.errors import EnvironmentUnfit, UsageError
from bundle.packing.prompts import Prompt, VisualInputs


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How tokens are chosen; at temperature 0 the likeliest one."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


class TokenIdStreamer:
    """What transformers calls with the prompt, and then with each new token."""

    def __init__(self, show: Callable[[int], None]) -> None:
        self._show, self._has_prompt = show, False

    def put(self, ids: Tensor) -> None:
        """Show the tokens behind the prompt."""
        for token in ids.flatten().tolist() if self._has_prompt else ():
            self._show(token)
        self._has_prompt = True

    def end(self) -> None:
        """Do nothing: the answer is returned as well."""


def generate_answers(
    directory: Path,
    prompts: Iterable[Prompt],
    eos_token_ids: Sequence[int],
    sampling: GenerationOptions,
    show: Callable[[int], None] = lambda token: None,
) -> Iterator[list[int]]:
    """Yield the ids that the model of a Hugging Face directory generates after each prompt, in their order.

    An answer ends with one of `eos_token_ids`, with an end token of the directory's generation config, or
    at `max_tokens`. The rest of that config has no effect. MTP layers are not used. Calls `show`
    with each token. Raises EnvironmentUnfit without transformers, UsageError for a directory that it does not
    open whole.
    """
    model = _open_model(directory)
    model_eos = model.generation_config.eos_token_id
    stop_ids = {
        *eos_token_ids,
        *(model_eos if isinstance(model_eos, list) else () if model_eos is None else (model_eos,)),
    }
    sampling_options = {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": 0,
    }
    settings = type(model.generation_config)(
        max_new_tokens=sampling.max_tokens,
        eos_token_id=sorted(stop_ids),
        pad_token_id=eos_token_ids[0],
        **(sampling_options if sampling.temperature else {"do_sample": False}),
    )
    torch.manual_seed(sampling.seed)
    for prompt in prompts:
        ids = torch.tensor([list(prompt.ids)], device=model.device)
        model.generation_config = settings
        inputs = {
            "attention_mask": torch.ones_like(ids),
            **_build_visual_inputs(model, ids, prompt.visual_inputs),
        }
        output = model.generate(ids, **inputs, generation_config=settings, streamer=TokenIdStreamer(show))
        yield output[0, ids.shape[1] :].tolist()


def _build_visual_inputs(model: Any, ids: Tensor, visual_inputs: VisualInputs | None) -> dict[str, Tensor]:
    """Return the images and videos of token ids [1, t] as arguments that transformers' model accepts."""
    if visual_inputs is None:
        return {}
    kinds = (ids == model.config.image_token_id).int() + 2 * (ids == model.config.video_token_id).int()
    inputs = {"mm_token_type_ids": kinds}
    patches_by_grid = visual_inputs.patches.split(visual_inputs.grids.prod(1).tolist())
    for is_video, pixels, grids in (
        (False, "pixel_values", "image_grid_thw"),
        (True, "pixel_values_videos", "video_grid_thw"),
    ):
        is_selected = (visual_inputs.seconds > 0) == is_video
        if is_selected.any():
            inputs[pixels] = torch.cat(
                [patches_by_grid[number] for number in is_selected.nonzero().flatten().tolist()]
            )
            inputs[grids] = visual_inputs.grids[is_selected]
    if (visual_inputs.seconds > 0).any():
        inputs["second_per_grid_ts"] = visual_inputs.seconds[visual_inputs.seconds > 0].float()
    parameters = inspect.signature(model.forward).parameters
    return {name: tensor.to(model.device) for name, tensor in inputs.items() if name in parameters}


def _open_model(directory: Path) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise EnvironmentUnfit("generate needs transformers: pip install 'mcore-bundle[data]'") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(directory, **local)
        with_images = hasattr(config, "vision_config")
        kind = transformers.AutoModelForImageTextToText if with_images else transformers.AutoModelForCausalLM
        model, loading_info = kind.from_pretrained(
            directory, config=config, dtype="auto", output_loading_info=True, **local
        )
    except Exception as error:  # transformers trusts what stands in the files
        version = transformers.__version__
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(f"{directory}: transformers {version} cannot open it: {reason}") from error
    if missing := sorted(loading_info["missing_keys"]):
        raise UsageError(f"{directory}: weights that transformers needs are missing", missing[:10])
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    return model.eval().to(device)
