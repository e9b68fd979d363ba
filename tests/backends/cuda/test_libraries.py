"""What the cuda backend loads before megatron, and what it says where it cannot."""

import sys

import pytest
import torch

from bundle.backends import cuda
from bundle.backends.cuda import set_up_runtime
from bundle.errors import EnvironmentUnfit


@pytest.fixture(autouse=True)
def _torch(monkeypatch):
    """The messages name the same torch on every machine."""
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    monkeypatch.setattr(torch.version, "cuda", "12.8")


def test_without_a_gpu_nothing_is_loaded(monkeypatch, messages):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentUnfit, match="GPU") as error:
        set_up_runtime()
    messages(error.value)


def test_the_reason_why_transformer_engine_cannot_be_loaded_is_told(monkeypatch, messages):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "_find_search_path", lambda package: [])
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(EnvironmentUnfit, match="ModuleNotFoundError") as error:
        set_up_runtime()
    messages(str(error.value).splitlines()[0])


def test_all_parts_of_torchs_own_cudnn_are_found(tmp_path):
    there = tmp_path / "second/cudnn/lib"
    there.mkdir(parents=True)
    for name in ("libcudnn.so.9", "libcudnn_ops.so.9", "libcudnn_ops_static.a"):
        (there / name).touch()
    found = cuda.find_packaged_cudnn_libraries([str(tmp_path / "first"), str(tmp_path / "second")])
    assert [path.name for path in found] == ["libcudnn.so.9", "libcudnn_ops.so.9"]


def test_a_torch_without_packages_of_its_own_has_none():
    assert cuda.find_packaged_cudnn_libraries(cuda._find_search_path("no_such_package")) == []


def test_a_pointwise_kernel_is_compiled_for_one_block_size(monkeypatch):
    from torch._inductor import config

    monkeypatch.setattr(config.triton, "autotune_pointwise", True)
    monkeypatch.setattr(cuda, "load_cudnn_and_transformer_engine", lambda: None)
    monkeypatch.setattr(cuda, "provide_extension", lambda: None)
    set_up_runtime()
    assert not config.triton.autotune_pointwise
