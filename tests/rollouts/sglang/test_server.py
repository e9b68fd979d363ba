"""Servers in processes: keys stay secret, nothing outlives its parent, a dead one is replaced."""

import hashlib
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bundle.errors import EnvironmentUnfit, JobFailed
from bundle.rollouts.sglang.checksums import ExpectedHashHelper
from bundle.rollouts.sglang.client import Keys
from bundle.rollouts.sglang.server import ServerProcess, ServerReplica, check_installation
from bundle.weight_sync.transports.ipc import Bucket
from tests.rollouts.sglang.building import REQUESTS, build_tensors, run_cluster
from tests.rollouts.sglang.contract_server import wait_until
from tests.rollouts.sglang.site import REPOSITORY, build_python

pytestmark = pytest.mark.processes
PARENT = """
import sys
from pathlib import Path
from bundle.rollouts.sglang.server import ServerProcess
arguments = ["--model-path", sys.argv[2], "--load-format", "dummy", "--has-child"]
server = ServerProcess(sys.argv[1], arguments, Path(sys.argv[3]))
server.start()
print("started", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def python(tmp_path) -> str:
    return build_python(tmp_path / "environment")


@pytest.fixture
def arguments(tmp_path) -> list[str]:
    (tmp_path / "config.json").write_text("{}")
    return ["--model-path", str(tmp_path), "--load-format", "dummy"]


def read_number(log: Path, word: str) -> int:
    def find() -> list[str]:
        lines = log.read_text().splitlines() if log.exists() else []
        return [line.split()[1] for line in lines if line.startswith(f"{word} ")]

    wait_until(lambda: bool(find()), 60)
    return int(find()[-1])


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_server_serves_is_replaced_when_killed_and_keeps_its_keys(tmp_path, python, arguments):
    log = tmp_path / "server.log"
    parts = iter(("0.5", "0.25"))
    process = ServerProcess(
        python, [*arguments, "--has-child"], log, lambda: ("--mem-fraction-static", next(parts))
    )
    replica = ServerReplica("replica 0", process, seconds=60, start_seconds=60, backoff_seconds=0.01)
    with run_cluster(tmp_path / "weights", replicas=[replica]) as cluster:
        cluster.sync(1)
        assert cluster.ask() == [(1, 1, 1)] * len(REQUESTS)
        first, keys = read_number(log, "pid"), process.keys
        assert len(keys.api) > 30 < len(keys.admin) and keys.api != keys.admin
        for place in ("cmdline", "environ"):
            content = Path(f"/proc/{first}/{place}").read_bytes()
            assert content and keys.api.encode() not in content and keys.admin.encode() not in content
        os.kill(first, signal.SIGKILL)
        assert cluster.ask() == [(1, 1, 1)] * len(REQUESTS)
        second = read_number(log, "pid")
        assert second != first and process.keys != keys
        child = read_number(log, "child")
        cluster.sync(2)
        assert cluster.ask() == [(2, 2, 2)] * len(REQUESTS)
        text = log.read_text()
        assert text.index("mem_fraction_static=0.5,") < text.index("mem_fraction_static=0.25,")
        for secret in (keys.api, keys.admin, process.keys.api, process.keys.admin):
            assert secret not in text
        assert "***" in text
    assert process.wait(0)
    wait_until(lambda: not is_running(second) and not is_running(child), 20)


def test_a_server_and_its_children_end_with_the_run_however_that_ends(tmp_path, python, arguments):
    log = tmp_path / "server.log"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, python, str(tmp_path), str(log)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    pids = [read_number(log, "pid"), read_number(log, "child")]
    assert all(map(is_running, pids))
    parent.kill()
    parent.communicate()
    wait_until(lambda: not any(map(is_running, pids)), 20)


def test_keys_may_begin_with_a_hyphen(tmp_path, python, arguments, monkeypatch):
    monkeypatch.setattr(secrets, "token_urlsafe", lambda count: "-key")
    process = ServerProcess(python, arguments, tmp_path / "server.log")
    replica = ServerReplica("replica 0", process, seconds=60, start_seconds=60)
    replica.restart()
    assert process.keys == Keys("-key", "-key") and replica.is_alive()
    replica.stop_owned_server()


def test_a_server_that_dies_while_it_loads_shows_its_last_lines(tmp_path, python, arguments):
    process = ServerProcess(python, [*arguments, "--dies-while-loading"], tmp_path / "server.log")
    replica = ServerReplica("replica 0", process, seconds=60, start_seconds=60)
    with pytest.raises(JobFailed) as error:
        replica.restart()
    assert "MemoryError" in error.value.violations[-1]
    assert process.keys.api not in str(error.value) and process.keys.admin not in str(error.value)


def test_a_server_that_never_answers_ends_at_its_time_limit(tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    process = ServerProcess(str(program), [], tmp_path / "server.log")
    replica = ServerReplica("replica 0", process, seconds=1, start_seconds=0.3)
    with pytest.raises(JobFailed):
        replica.restart()
    assert process.wait(0)


@pytest.mark.parametrize("version", [None, "0.5.15", "0.5.16rc1", "nonsense"])
def test_a_python_without_a_fitting_sglang_is_refused(tmp_path, version, messages):
    with pytest.raises(EnvironmentUnfit) as error:
        check_installation(build_python(tmp_path, version))
    assert (error.value.code == 3 and version is None) or version in str(error.value)
    messages(error.value)


def test_a_program_that_is_none_is_refused(tmp_path):
    with pytest.raises(EnvironmentUnfit):
        check_installation(str(tmp_path / "python"))


@pytest.mark.parametrize("version", ["0.5.16", "0.5.23", "0.6.0.dev1"])
def test_a_fitting_sglang_is_accepted(tmp_path, version):
    assert check_installation(build_python(tmp_path, version)) == version


def compute_hash(*tensors: torch.Tensor) -> str:
    data = b"".join(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(data).digest()[:8].hex()


def test_a_helper_puts_together_what_the_server_has(tmp_path, python, share_by_names):
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    parts = ["layers.0.q_proj.weight", "layers.0.k_proj.weight", "layers.0.v_proj.weight", "norm.weight"]
    parts += [f"mlp.experts.{e}.{p}_proj.weight" for e in range(12) for p in ("gate", "up", "down")]
    parts += ["model.embed_tokens.weight", "b.gate_proj.bias", "b.up_proj.bias", "c.q_proj.weight"]
    parts += ["d.q_a_proj.weight", "d.kv_a_proj_with_mqa.weight"]
    parts += [f"model.layers.4.{part}.weight" for part in ("eh_proj", "mlp.gate_proj", "mlp.up_proj")]
    tensors = {name: torch.randn(3, 4, generator=generator).bfloat16() for name in parts}
    save_file({name: tensors[name] for name in parts[:7]}, tmp_path / "model-00001.safetensors")
    save_file({name: tensors[name] for name in parts[7:]}, tmp_path / "model-00002.safetensors")
    experts = [
        [tensors[f"mlp.experts.{e}.{p}_proj.weight"] for p in ("gate", "up", "down")] for e in range(12)
    ]
    expected = {
        "norm.weight": compute_hash(tensors["norm.weight"]),
        "layers.0.qkv_proj.weight": compute_hash(*(tensors[name] for name in parts[:3])),
        "mlp.experts.w13_weight": compute_hash(*(part for expert in experts for part in expert[:2])),
        "mlp.experts.w2_weight": compute_hash(*(expert[2] for expert in experts)),
        "model.embed_tokens.weight": compute_hash(
            tensors["model.embed_tokens.weight"], torch.zeros(61, 4).bfloat16()
        ),
        "b.gate_up_proj.bias": compute_hash(tensors["b.gate_proj.bias"], tensors["b.up_proj.bias"]),
        "d.fused_qkv_a_proj_with_mqa.weight": compute_hash(
            tensors["d.q_a_proj.weight"], tensors["d.kv_a_proj_with_mqa.weight"]
        ),
        "draft.model.eh_proj.weight": compute_hash(tensors["model.layers.4.eh_proj.weight"]),
        "draft.model.decoder.mlp.gate_up_proj.weight": compute_hash(
            *(tensors[f"model.layers.4.mlp.{part}_proj.weight"] for part in ("gate", "up"))
        ),
    }
    expected["draft.model.embed_tokens.weight"] = expected["model.embed_tokens.weight"]
    unknown = ["draft.model.norm.weight", "c.qkv_proj.weight", "other.experts.w2_weight", "other.experts.x"]
    helper = ExpectedHashHelper(python, 60)
    assert helper.compute_expected_checksums(tmp_path, dict.fromkeys([*expected, *unknown], "")) == expected
    with pytest.raises(JobFailed):
        helper.compute_expected_checksums(tmp_path / "none", {"norm.weight": ""})
    assert helper.compute_expected_checksums(tmp_path, {"norm.weight": ""}) == {
        "norm.weight": expected["norm.weight"]
    }
    for addend in (0, 1):  # a second version replaces the first
        for names in (parts[:7], parts[7:]):
            helper.submit_bucket(Bucket([(name, tensors[name] + addend) for name in names]))
        checksums = helper.compute_expected_checksums(None, dict.fromkeys([*expected, *unknown], ""))
        assert checksums["norm.weight"] == compute_hash(tensors["norm.weight"] + addend)
        assert checksums.keys() == expected.keys() and (checksums == expected) is (addend == 0)
    with pytest.raises(JobFailed):
        helper.compute_expected_checksums(None, {"norm.weight": ""})  # no bucket came since
    helper.close()


@pytest.mark.parametrize("body", ["exit 1", "sleep 600", "echo nonsense; sleep 600"])
def test_a_helper_that_fails_is_no_proof(tmp_path, body, share_by_names):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    with pytest.raises(JobFailed):
        ExpectedHashHelper(str(program), 0.3).compute_expected_checksums(tmp_path, {"a": ""})
    with pytest.raises(JobFailed):
        ExpectedHashHelper(str(program), 0.3).submit_bucket(Bucket([("a", torch.ones(1))]))


def test_weights_of_runs_that_were_killed_are_removed(tmp_path):
    from bundle.weight_sync.manifest import ExpectedTensors
    from bundle.weight_sync.transports.files import FilesTransport

    empty = ExpectedTensors({}, frozenset(), {})
    abandoned = tmp_path / "mcore-bundle-weights-abandoned"
    abandoned.mkdir()
    (tmp_path / "somebody").mkdir()
    first = FilesTransport(tmp_path, empty, has_draft=False)
    written = first.write(1, build_tensors(1).items())
    second = FilesTransport(tmp_path, empty, has_draft=False)
    assert not abandoned.exists() and (tmp_path / "somebody").exists()
    assert {tensor.role for tensor in written.manifest.tensors.values()} == {"target"}
    assert [*written.directory.glob("*.safetensors")]
    for transport in (first, second):
        transport.close()
    assert [path.name for path in tmp_path.iterdir()] == ["somebody"]
