"""The benchmark of kernels reads a trace, and a product of many small matrices is never expected."""

import gzip
import json

import pytest

from benchmarks.gpu.kernels import Kernel, read_kernels


def test_a_kernel_belongs_to_the_operator_that_launched_it(tmp_path):
    events = [
        {"cat": "cpu_op", "name": "aten::mm", "args": {"External id": 7}},
        {"cat": "kernel", "name": "gemm", "dur": 1500, "args": {"External id": 7}},
        {"cat": "kernel", "name": "gemm", "dur": 500, "args": {"External id": 7}},
        {"cat": "gpu_memcpy", "name": "Memcpy", "dur": 250, "args": {}},
        {"cat": "cuda_runtime", "name": "launch", "dur": 9000, "args": {"External id": 7}},
    ]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    assert read_kernels(path) == {Kernel("aten::mm", "gemm"): 2.0, Kernel("", "Memcpy"): 0.25}


@pytest.mark.parametrize(
    ("operator", "name", "case", "expected"),
    [
        ("aten::mm", "nvjet_sm90_tst_512x8", "lora", True),
        ("aten::bmm", "nvjet_sm90_tst_512x8", "lora", False),
        ("aten::sub", "elementwise_kernel", "dpo", True),
        ("aten::sub", "elementwise_kernel", "sft", False),
    ],
)
def test_expectations_depend_on_operator_and_case(operator, name, case, expected):
    assert Kernel(operator, name).is_expected(case) is expected
