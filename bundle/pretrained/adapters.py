"""Whether the adapter that a recipe begins with is one of its model: names, shapes, kinds of numbers."""

from collections.abc import Iterator
from pathlib import Path

from bundle.architectures import adapters, peft
from bundle.architectures.tensors import Tensors
from bundle.errors import UsageError
from bundle.pretrained.directory import Pretrained, summarized
from bundle.pretrained.header import Damaged, Entry, entries, quoted
from bundle.pretrained.matching import FLOATS
from bundle.recipe import Recipe


def adapter_of_recipe(recipe: Recipe) -> Pretrained | None:
    """The matrices in model.lora.path; None: new ones. Raises UsageError with every reason against them."""
    lora = recipe.model.lora
    if lora is None or lora.path is None:
        return None
    directory = Path(lora.path)
    try:
        found = entries(directory / peft.WEIGHTS)
    except Damaged as damage:
        raise UsageError(f"{directory / peft.WEIGHTS}: cannot be read", damage.reasons) from damage
    if violations := list(_against(found, recipe)):
        raise UsageError(f"{directory}: not an adapter of this model", summarized(violations))
    return Pretrained(directory, found)


def _against(found: dict[str, Entry], recipe: Recipe) -> Iterator[str]:
    """Everything that is wrong; PEFT knows no MTP layers, and an adapter may be without theirs."""
    lora = recipe.model.lora
    assert lora is not None
    expected: dict[str, tuple[int, ...]] = {}
    optional: set[str] = set()
    for tensor in Tensors(recipe.architecture):
        for pair in filter(None, adapters.pairs(tensor, lora.targets, lora.rank)):
            of_pair = {f"{peft.PREFIX}{matrix.name}": matrix.shape for matrix in pair}
            expected |= of_pair
            if tensor.name.startswith("mtp."):
                optional.update(of_pair)
    for name, shape in expected.items():
        if name not in found:
            if name not in optional:
                yield f"{name} is missing"
        elif found[name].shape != shape:
            yield f"{name} is {list(found[name].shape)}, the model's is {list(shape)}"
        elif found[name].dtype not in FLOATS:
            yield f"{name} holds {found[name].dtype}: only {', '.join(FLOATS)} are read"
    yield from (f"{quoted(name)} belongs to none of the targets" for name in found if name not in expected)
