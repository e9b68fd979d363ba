"""The weights of a model with the adapters of a checkpoint merged into them, tensor by tensor."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bundle import pretrained
from bundle.architectures import adapters, tensors
from bundle.architectures.adapters import LoraMatrix
from bundle.architectures.tensors import Tensors
from bundle.errors import UsageError
from bundle.mcore.torch_dist import TorchDistCheckpoint
from bundle.models import loading
from bundle.models.finite_check import FiniteCheck
from bundle.models.mapped_files import MappedFiles
from bundle.pretrained import PretrainedWeights
from bundle.pretrained.directory import limit_violations
from bundle.recipe import Recipe
from bundle.recipe.recipe import LoRA


@dataclass(frozen=True, slots=True)
class AdapterBaseModel:
    """What adapters are trained beside: every weight of the model, in the kind of numbers of the training."""

    weights: PretrainedWeights
    dtype: torch.dtype
    lora: LoRA


def find_base(recipe: Recipe) -> AdapterBaseModel | None:
    """Return what a recipe's adapters are trained beside; None where it trains the weights themselves.

    Raise UsageError for weights that cannot be loaded, and for random ones.
    """
    lora = recipe.model.lora
    if lora is None:
        return None
    weights = pretrained.find_recipe_weights(recipe)
    if weights is None:
        raise UsageError(
            "model.lora: the adapters were trained on random weights, which are not saved in any file. Set"
            " checkpoint.export: hf in the run, which writes the whole model"
        )
    return AdapterBaseModel(weights, torch.bfloat16 if recipe.model.dtype == "bf16" else torch.float32, lora)


class MergedTensors:
    """The tensors of a table: W + scale * B A where the checkpoint has an adapter."""

    def __init__(self, checkpoint: TorchDistCheckpoint, table: Tensors, base: AdapterBaseModel) -> None:
        """Raise UsageError with every matrix that the checkpoint lacks or has in another shape."""
        self._checkpoint, self._base = checkpoint, base
        self._files, self._check = MappedFiles(), FiniteCheck(base.weights)
        self._pairs = {
            tensor.name: adapters.build_adapter_pairs(
                tensor, base.lora.targets, base.lora.rank, use_dora=base.lora.use_dora
            )
            for tensor in table
        }
        matrices = (
            matrix
            for pairs in self._pairs.values()
            for pair in filter(None, pairs)
            for matrix in pair.list_trained_matrices()
        )
        mismatches = (_describe_checkpoint_matrix_mismatch(checkpoint.tensors, matrix) for matrix in matrices)
        if violations := [line for line in mismatches if line]:
            raise UsageError(
                f"{checkpoint.root}: these adapters do not fit this model (model.lora)",
                limit_violations(violations),
            )

    def read_megatron_tensor(self, tensor: tensors.Tensor) -> Tensor:
        """Return a tensor of the table. Raise JobFailed for files that cannot be read."""
        dtype = torch.float32 if tensors.is_buffer(tensor.name) else self._base.dtype
        weight = loading.read_whole_tensor(self._base.weights, tensor, dtype, self._files, self._check)
        pairs = self._pairs[tensor.name]
        if not pairs:
            return weight
        products = [
            None
            if pair is None
            else self._checkpoint.read(pair.b.name).float() @ self._checkpoint.read(pair.a.name).float()
            for pair in pairs
        ]
        merged, start, rule = weight.float(), 0, tensor.rule
        merged = merged.clone() if merged is weight else merged
        for piece in rule.iterate_pieces():
            if (product := products[piece.source]) is not None:
                rows = (slice(None),) * rule.dim + (slice(piece.start, piece.stop, piece.step),)
                target = merged.narrow(rule.dim, start, piece.length)
                target.add_(product[rows], alpha=self._base.lora.scale)
                pair = pairs[piece.source]
                if pair is not None and pair.magnitude is not None:
                    magnitude = self._checkpoint.read(pair.magnitude.name).float()[rows]
                    target.mul_((magnitude / target.norm(dim=1)).unsqueeze(1))
            start += piece.length
        return merged.to(dtype)

    def refuse_nonfinite_read_weights(self) -> None:
        """Raise UsageError where weights that were read are not finite."""
        self._check.refuse_nonfinite_tensors()


def _describe_checkpoint_matrix_mismatch(
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], matrix: LoraMatrix
) -> str:
    """Return what is wrong with a checkpoint's matrix; "" where nothing is."""
    if matrix.name not in shapes:
        return f"{matrix.name} is missing"
    shape, _ = shapes[matrix.name]
    return "" if shape == matrix.shape else f"{matrix.name} has shape {list(shape)}, not {list(matrix.shape)}"
