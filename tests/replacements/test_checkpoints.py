"""Old releases' checkpoints beside newer packages."""

import types

import pytest

from bundle.patches.entry import PatchAction
from bundle.patches.megatron_core import load_review_table, resolve_core_path_or_version
from bundle.patches.plan import survey_patches
from bundle.replacements import checkpoints
from tests.environment.test_packages import install, stack

PRODUCT = "dist-checkpoint-numpy-product"


def numpy_without_product() -> types.ModuleType:
    """What numpy 2 has of numpy: a name that is found lazily, and no `product`."""

    def lazily(name: str) -> str:
        if name == "char":
            return "found"
        raise AttributeError(f"module 'numpy' has no attribute {name!r}")

    module = types.ModuleType("numpy")
    vars(module).update(prod=lambda shape: shape[0] * shape[1], __getattr__=lazily)
    return module


def test_numpy_gets_its_old_name_back_for_one_module_only():
    numpy = numpy_without_product()
    older = checkpoints.restore_numpy_product(numpy)
    assert older.product((3, 4)) == older.prod((3, 4)) == 12
    assert older.char == "found"
    with pytest.raises(AttributeError, match="'alltrue'"):
        _ = older.alltrue
    assert not hasattr(numpy, "product")


@pytest.mark.parametrize(
    ("release", "numpy", "action", "value"),
    [
        ("0.15.3", "2.0.0", PatchAction.APPLY, ""),
        ("0.12.3", "1.26.4", PatchAction.SKIP, "numpy 1.26.4"),
        ("0.13.1", None, PatchAction.APPLY, ">=2"),
        ("0.16.0", "2.3.5", PatchAction.SKIP, ""),
    ],
)
def test_the_numpy_that_is_installed_decides(tmp_path, release, numpy, action, value, messages):
    if numpy:
        install(tmp_path, "numpy", numpy)
    table = load_review_table()
    decisions = survey_patches(
        resolve_core_path_or_version(release, table), table, stack(tmp_path), backend="cpu"
    ).decisions
    decision = next(decision for decision in decisions if decision.id == PRODUCT)
    assert decision.action is action and value in decision.reason
    messages(decision.reason)
