"""When torch-npu can be imported, what that changes in torch, and how many devices it sees."""

import pytest

from bundle.environment.doctor import AUTOLOAD_VARIABLE
from tests.npu.child import answer, child

pytestmark = pytest.mark.npu


def test_without_cann_importing_torch_itself_fails():
    ended = child("import torch", libraries=False)
    assert ended.code != 0 and f"{AUTOLOAD_VARIABLE}=0" in ended.err


def test_what_the_other_backends_set_keeps_it_out():
    from bundle.capabilities.cpu import CPU
    from bundle.capabilities.cuda import CUDA

    for backend in (CPU, CUDA):
        variables = {variable.name: variable.value for variable in backend.environment}
        assert variables[AUTOLOAD_VARIABLE] == "0"
    program = "import torch; print(hasattr(torch, 'npu'))"
    assert answer(program, libraries=False, autoload=False) == "False"


@pytest.mark.parametrize("first", ["import torch", "import torch_npu", "import torch, torch_npu"])
def test_any_order_of_imports_brings_the_operator(first):
    program = (
        f"{first}\nimport torch\nprint(torch.ops.npu.npu_fusion_attention.__name__, torch.npu.is_available())"
    )
    assert answer(program).split() == ["npu_fusion_attention", "True"]


@pytest.mark.parametrize(("devices", "seen"), [(0, "False 0"), (2, "True 2")])
def test_devices_are_counted(devices, seen):
    program = "import torch; print(torch.npu.is_available(), torch.npu.device_count())"
    assert answer(program, devices=devices) == seen


def test_a_device_has_its_chips_name_and_memory():
    program = "import torch; print(torch.npu.get_device_name(1), torch.arange(3).npu().cpu().tolist())"
    assert answer(program) == "Ascend910B3 [0, 1, 2]"


def test_after_transfer_to_npu_torch_cuda_speaks_of_npus():
    """So a backend is never found out through torch.cuda: MindSpeed imports this."""
    program = """
import torch
before = torch.cuda.is_available()
from torch_npu.contrib import transfer_to_npu
print(before, torch.cuda.is_available(), torch.cuda.device_count())
"""
    assert answer(program) == "False True 2"


def test_what_the_stand_in_does_not_compute_is_an_error():
    ended = child("import torch; x = torch.zeros(2).npu(); print((x + 1).cpu())")
    assert ended.code != 0 and "tensor(" not in ended.out
    assert "libascendcl" in ended.err
