"""What a checkpoint may hold: Transformer Engine's FP8 state (a contract: stand-ins of its classes)."""

import enum
import pickle
import sys
from types import ModuleType
from typing import Any, NamedTuple

import pytest

pytest.importorskip("megatron.core")

from bundle.mcore.unpickling import data_only

RECIPES, LAYERS = "transformer_engine.common.recipe", "megatron.core.extensions.transformer_engine"


class _FormatHelper(NamedTuple):
    fwd: float
    bwd: float


class Format(enum.Enum):
    HYBRID = _FormatHelper(448, 57344)

    def __reduce_ex__(self, _: Any) -> Any:
        return Format, (self.value,)  # as in Python 3.12; 3.11.7 too


class DelayedScaling:
    def __init__(self, **settings: Any) -> None:
        self.__dict__.update(settings)


class TEDelayedScaling(DelayedScaling):
    pass


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes above under the names that they have where Transformer Engine is installed."""
    owners = {RECIPES: (_FormatHelper, Format, DelayedScaling), LAYERS: (TEDelayedScaling,)}
    for package in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    for name, classes in owners.items():
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        for one in classes:
            monkeypatch.setattr(one, "__module__", name)
            setattr(module, one.__name__, one)


def test_the_state_of_delayed_scaling_is_data(engine: None):
    settings = {"margin": 0, "fp8_format": Format.HYBRID, "amax_history_len": 1024}
    state = {"recipe": TEDelayedScaling(**settings), "extra_fp8_variables": {"num_gemms": 1}}
    content = pickle.dumps(state)
    with data_only():
        found = pickle.loads(content)
    assert vars(found["recipe"]) == settings
    assert found["extra_fp8_variables"] == {"num_gemms": 1}


@pytest.mark.parametrize("name", ["torch", "te_checkpoint", "_OPTIONAL"])
def test_what_else_lies_beside_a_recipe_is_not(engine: None, name: str):
    sys.modules[RECIPES].__dict__[name] = print  # imported there, or a function of its own
    sys.modules[LAYERS].__dict__[name] = print
    for module in (RECIPES, LAYERS):
        with data_only(), pytest.raises(pickle.UnpicklingError, match=f"{module}.{name}"):
            pickle.loads(f"c{module}\n{name}\n(S'run'\ntR.".encode())
