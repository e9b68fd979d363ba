"""Builds transformers' own model of an architecture from published tensors that are in memory.

A model that answers is never filled: nobody can see it half filled. What transformers joins (the experts of a
layer) is joined by transformers itself, as it does with files.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bundle.architectures import Architecture
from bundle.architectures.published_names import PUBLISHED_NAMES
from bundle.architectures.tensors import Tensors
from bundle.errors import EnvironmentUnfit, JobFailed, UsageError

# Families that transformers has under the name of another one, which computes the same.
_MODEL_TYPE_ALIASES = {"mimo": "qwen2", "kimi_k2": "deepseek_v3"}
_MAX_LISTED_NAMES = 10  # names of one kind in a message


class TransformersModelBuilder:
    """Builds models of one architecture.

    `expected` are the shapes of the published tensors by name. transformers' models have neither the tensors
    of MTP layers, `mtp_names`, nor a copy of a tied embedding, `copy_names`.
    """

    def __init__(
        self, config: Mapping[str, Any], architecture: Architecture, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`config` is a Hugging Face config. Raise UsageError where transformers has no class for it.

        Raise EnvironmentUnfit without transformers, or with an old one.
        """
        self._transformers = _import_transformers()
        self._config, self._class = _build_config_and_find_class(
            self._transformers, config, architecture.model_type
        )
        self._dtype, self._device = dtype, device
        self._template: Any = None  # a model without values, which takes tensors by their names
        self._can_reuse = False
        trunk, full = Tensors(replace(architecture, mtp_layers=0)), Tensors(architecture)
        self.expected = {name: shape for tensor in trunk for name, shape in tensor.list_published_shapes()}
        self.copy_names = frozenset(trunk.map_copies())
        names = {*full.map_copies(), *(name for tensor in full for name in tensor.published_names)}
        self.mtp_names = frozenset(names - self.expected.keys() - self.copy_names)

    def build(self, tensors: Mapping[str, Tensor]) -> Any:
        """Return a model in evaluation mode that holds these published tensors, which it may take over.

        Raise JobFailed with every tensor that is missing, unexpected or of another shape.
        """
        weights = {
            name: tensor for name, tensor in tensors.items() if name not in self.mtp_names | self.copy_names
        }
        self._check(weights)
        if self._template is None:
            model = self._load(weights)
            self._can_reuse = dict(model.named_parameters()).keys() == weights.keys()
            if self._can_reuse:
                self._template = _build_empty_copy(model)
        else:
            model = _fill_template_model(self._template, weights)
            self._template = None
        return model.eval().requires_grad_(False).to(self._device)

    def recycle_model(self, model: Any) -> None:
        """Take back a model that answers no more: the next one is it with other values."""
        if self._can_reuse:
            _drop_parameter_values(model)
            self._template = model

    def _load(self, weights: Mapping[str, Tensor]) -> Any:
        """Return a new model that transformers has loaded. Raise JobFailed with what it does not take."""
        with self._silence_transformers(), torch.random.fork_rng(devices=[]):
            model, report = self._class.from_pretrained(
                None,
                config=copy.deepcopy(self._config),
                state_dict=weights,
                dtype=self._dtype,
                ignore_mismatched_sizes=True,  # they are in the report, all of them
                output_loading_info=True,
            )
        problems = [
            f"{kind.removesuffix('_keys')}: {key}"
            for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
            for key in sorted(map(str, report.get(kind) or ()))[:_MAX_LISTED_NAMES]
        ]
        if problems:
            version = self._transformers.__version__
            raise JobFailed(
                f"rollout: {self._class.__name__} of transformers {version} cannot load these weights."
                " Report it with the config of the model.",
                problems,
            )
        return model

    def _check(self, weights: Mapping[str, Tensor]) -> None:
        """Raise JobFailed where names or shapes are not those of the table of tensors."""
        missing = [f"missing: {name}" for name in self.expected if name not in weights]
        unexpected = [f"unexpected: {name}" for name in weights if name not in self.expected]
        reshaped = [
            f"shape: {name} is {list(weights[name].shape)}, but the model needs {list(shape)}"
            for name, shape in self.expected.items()
            if name in weights and tuple(weights[name].shape) != tuple(shape)
        ]
        if missing or unexpected or reshaped:
            raise JobFailed(
                f"rollout: the weights do not fit {self._class.__name__} ({len(missing)} missing,"
                f" {len(unexpected)} unexpected, {len(reshaped)} of another shape). Send all tensors of the"
                " trained model.",
                [
                    *missing[:_MAX_LISTED_NAMES],
                    *unexpected[:_MAX_LISTED_NAMES],
                    *reshaped[:_MAX_LISTED_NAMES],
                ],
            )

    @contextmanager
    def _silence_transformers(self) -> Iterator[None]:
        """Keep transformers from reporting on the terminal inside: `build` reads the report."""
        logging = self._transformers.logging
        level, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(level)
            if has_bar:
                logging.enable_progress_bar()


def _build_empty_copy(model: Any) -> Any:
    """Return a copy of a model without values."""
    empty = {id(parameter): _build_meta_parameter(parameter) for parameter in model.parameters()}
    return copy.deepcopy(model, empty)


def _drop_parameter_values(model: Any) -> None:
    """Free the values of all parameters of a model; its buffers stay."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, _build_meta_parameter(parameter))


def _build_meta_parameter(parameter: Tensor) -> torch.nn.Parameter:
    """Return a parameter of this shape and type without values."""
    return torch.nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)


def _fill_template_model(template: Any, weights: Mapping[str, Tensor]) -> Any:
    """Return the template itself, holding these tensors, each in the type that transformers chose."""
    types = {name: parameter.dtype for name, parameter in template.named_parameters()}
    values = {name: tensor.to(types[name]) for name, tensor in weights.items()}
    # Not strict: a tied head is named by its embedding alone.
    template.load_state_dict(values, strict=False, assign=True)
    template.tie_weights()
    return template


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise EnvironmentUnfit(
            "rl.rollout.engine: transformers is not installed. Run: pip install 'mcore-bundle[data]'"
        ) from error
    if int(transformers.__version__.partition(".")[0]) < 5:
        raise EnvironmentUnfit(
            f"rl.rollout.engine: transformers {transformers.__version__} is too old. Install 5.0 or newer."
        )
    return transformers


def _build_config_and_find_class(
    transformers: Any, config: Mapping[str, Any], model_type: str
) -> tuple[Any, Any]:
    """Return the config and the class of transformers. Raise UsageError where it has none for text."""
    entries = copy.deepcopy({**PUBLISHED_NAMES[model_type].config_defaults, **config})
    for name in ("model_type", "architectures", "auto_map", "quantization_config", "torch_dtype", "dtype"):
        entries.pop(name, None)
    kind = _MODEL_TYPE_ALIASES.get(model_type, model_type)
    try:
        model_config = transformers.AutoConfig.for_model(kind, **entries)
        return model_config, transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)]
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"rl.rollout.engine: transformers {transformers.__version__} has no text model for the"
            f" model_type {model_type}. Train a supported model_type."
        ) from error
