"""A server gets its part of the whole device as a part of what is free when it starts."""

from types import SimpleNamespace

import pytest
import torch

from bundle.errors import JobFailed
from bundle.rollouts.sglang.memory import TrainerMemory

KEY = "rl.rollout.mem_fraction_static"


@pytest.fixture
def device(monkeypatch):
    """A device of 100 bytes: the trainer has 40, 10 of them for no tensor, and another process 20."""
    state = SimpleNamespace(reserved=40)
    module = SimpleNamespace(
        empty_cache=lambda: setattr(state, "reserved", 30),
        mem_get_info=lambda device: (80 - state.reserved, 100),
        memory_reserved=lambda device: state.reserved,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return state


def test_a_part_of_the_device_is_a_part_of_what_is_free(device):
    assert TrainerMemory(torch.device("meta"), 1, 0.2).compute_mem_fraction_static() == 0.4  # 20 of 50
    assert device.reserved == 30
    assert TrainerMemory(torch.device("meta"), 1, 0.49).compute_mem_fraction_static() == 0.95
    assert TrainerMemory(torch.device("meta"), 1).compute_mem_fraction_static() is None


def test_a_device_that_another_process_uses_is_refused(device, messages):
    with pytest.raises(JobFailed) as error:
        TrainerMemory(torch.device("meta"), 1, 0.51).compute_mem_fraction_static()
    assert str(error.value).partition(":")[0] == KEY
    messages(error.value)


def test_the_trainer_can_have_what_is_free_and_what_it_has(device):
    memory = TrainerMemory(torch.device("meta"), 1)
    assert memory.read_free_and_trainer_bytes() == 80
    memory.release_cache()
    assert memory.read_free_and_trainer_bytes() == 80
