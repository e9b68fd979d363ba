from dataclasses import replace

import pytest

from bundle.errors import UsageError
from bundle.targets import images
from tests.targets.kubernetes.jobs import planned


@pytest.fixture(scope="module")
def job():
    return planned(2, 1, "cpu", "cpu")


@pytest.mark.parametrize(
    ("backend", "generation", "megatron", "found"),
    [
        ("cpu", "", "0.16.1", "cpu:"),
        ("cuda", "9.0", "0.16.0", "cuda-torch2.11.0-mcore0.16.1-ib"),
        ("cuda", "10.0", "0.19.2", "mcore0.19.2-ib"),
        ("ascend", "a2", "0.15.0", "ascend-a2-torch2.7.1-mcore0.15.3"),
        ("ascend", "a3", "0.16.1", "ascend-a3-torch2.10.0-mcore0.16.1"),
        ("ascend", "a3", "0.16.0", "ascend-a3-torch2.10.0-mcore0.16.0"),
        ("ascend", "a3", "0.16.7", "ascend-a3-torch2.10.0-mcore0.16.1"),
    ],
)
def test_an_image_is_for_a_backend_a_chip_and_a_minor_of_megatron(job, backend, generation, megatron, found):
    asked = replace(job, backend=backend, generation=generation, megatron=megatron)
    name = images.find_matching_name(asked, "registry.example/team")
    assert name.startswith("registry.example/team/") and found in name


@pytest.mark.parametrize(
    ("backend", "generation", "megatron"),
    [("cuda", "9.0", "0.17.0"), ("ascend", "a5", "0.16.0"), ("ascend", "", "0.16.0"), ("cpu", "", "none")],
)
def test_where_there_is_none_those_that_there_are_are_named(job, backend, generation, megatron, messages):
    asked = replace(job, backend=backend, generation=generation, megatron=megatron)
    with pytest.raises(UsageError, match="--image") as refused:
        images.find_matching_name(asked)
    assert f"{backend}:" in str(refused.value)
    messages(str(refused.value).splitlines()[0])  # those that there are change with every image
