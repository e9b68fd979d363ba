"""What is asked of NCCL's own service, as its client asks it. The real one: benchmarks.gpu.links."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bundle.launch import network, outcomes, ras
from bundle.launch.hang import HangEvidenceCollector
from bundle.launch.outcomes import RankState
from bundle.launch.rendezvous import discover


@contextmanager
def service(answers: list[bytes]) -> Iterator[tuple[str, list[bytes]]]:
    """A service that answers so to one line after the other, and then hangs up; what it was asked."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            client, _ = listening.accept()
            with client, client.makefile("rb") as lines:
                for answer in answers:
                    heard.append(lines.readline())
                    for first in range(0, len(answer), 7):  # it comes in pieces
                        client.sendall(answer[first : first + 7])

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}", heard
        thread.join()


def test_all_that_it_says_is_put_down_after_it_was_told_not_to_wait_long(tmp_path, monkeypatch):
    said = "NCCL version 2.27\n  #0-1 (0) MISMATCH\n" * 400 + "héllo\n"
    with service([b"OK\n", said.encode()]) as (address, heard):
        monkeypatch.setenv("NCCL_RAS_ADDR", address)
        ras.write(tmp_path / "said.txt")
    assert (tmp_path / "said.txt").read_text() == said
    assert heard == [b"TIMEOUT 1\n", b"VERBOSE STATUS\n"]


@pytest.mark.parametrize("answers", [[b"ERROR: no such command\n"], [b""]])
def test_who_answers_otherwise_is_not_nccl(answers):
    with service(answers) as (address, _):
        assert ras.query_status(address) == ""


@pytest.mark.parametrize("address", ["127.0.0.1:9", "nonsense", "host:port"])
def test_where_nobody_listens_nothing_is_written(address, tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_RAS_ADDR", address)
    ras.write(tmp_path / "said.txt")
    assert list(tmp_path.iterdir()) == []


def test_pods_of_one_node_do_not_overwrite_what_each_was_told(tmp_path, monkeypatch):
    wrote = threading.Barrier(3)

    def write(path):
        path.write_text("told")
        wrote.wait(60)

    monkeypatch.setattr(ras, "write", write)
    monkeypatch.setenv("K8S_NODE_NAME", "gpu01")
    (tmp_path / outcomes.HANG_FILE).touch()
    for node_rank in (0, 1):
        rendezvous = discover({}, nodes=2, node_rank=node_rank, endpoint="node0:29500")
        HangEvidenceCollector(tmp_path, rendezvous).poll_and_write_snapshots(
            [RankState(4 * node_rank + n, n, 1, 0.0) for n in range(4)]
        )
    wrote.wait(60)
    assert [connections.node for connections in network.read(tmp_path)] == ["gpu01", "gpu01"]
    written = {path.name.partition(".")[0] for path in tmp_path.glob("*.nccl.txt")}
    assert written == {"hang-rank-0", "hang-rank-4"}
