"""Router replay is asked for by the recipe."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from bundle.engine.microbatch import from_rows
from bundle.engine.replay import RouterReplay
from bundle.engine.routes import Routes
from bundle.errors import UsageError
from bundle.mcore.groups import Groups, ParallelGroup
from tests.matrix.cases import Case

_ALONE: Any = ParallelGroup(1, 0, None)  # type: ignore[arg-type]


@pytest.fixture
def replay():
    groups = Groups(_ALONE, _ALONE, _ALONE, _ALONE, _ALONE, _ALONE, vpp=1)
    return RouterReplay(Case("", {}).recipe(), [], groups)


def test_without_it_nothing_is_recorded(replay, messages):
    with pytest.raises(UsageError, match="router_replay") as error, replay.record_routes():
        pass
    messages(error.value)


def test_without_it_no_routes_are_taken(replay, messages):
    x = torch.zeros(1, 4, dtype=torch.int64)
    batch = from_rows(x, x, x.float(), cp=1, rank=0, mtp_layers=0)
    with replay.replay_micro_batch_routes([batch], has_backward=False):
        pass
    given = replace(batch, routes=Routes((1,), torch.zeros(4, 1, 2, dtype=torch.uint8)))
    with (
        pytest.raises(UsageError, match="router_replay") as error,
        replay.replay_micro_batch_routes([given], has_backward=False),
    ):
        pass
    messages(error.value)
