"""What an evaluation leaves behind."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bundle.engine import Engine


def test_an_evaluation_that_raises_leaves_the_model_training():
    model = torch.nn.Dropout()
    engine: Any = SimpleNamespace(runtime=SimpleNamespace(megatron_calls=nullcontext), chunks=[model])
    with pytest.raises(ValueError, match="a bad batch"), Engine._enter_evaluation(engine):
        assert not model.training
        raise ValueError("a bad batch")
    assert model.training
