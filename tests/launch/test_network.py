"""A network that fails between two nodes, as the kernels of both see it."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bundle.launch import network, outcomes
from bundle.launch.network import NodeConnections, describe_pairs, find_cut_pairs
from tests.launch.launched import finish, gone, read_verdict, start
from tests.launch.test_faults import SECONDS, WORKER, node

HAS_NAMESPACES = os.geteuid() == 0 and shutil.which("ip") is not None
# A connection each: answered, listening, sent again three times, twice, a stopped reader, IPv6, IPv4 in IPv6.
_TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100000A:1F90 0200000A:C350 01 00000000:00000000 00:00000000 00000000     0        0 1 1 0 20 4 30 10 -1
   1: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 2 1 0 100 0 0 10 0
   2: 0100000A:1F90 0300000A:C350 01 00000009:00000000 01:00000040 00000003     0        0 3 2 0 160 4 30 1 7
   3: 0100000A:1F90 0400000A:C350 01 00000009:00000000 01:00000040 00000002     0        0 4 2 0 160 4 30 1 7
   4: 0100000A:1F90 0500000A:C350 01 00000009:00000000 04:00000040 00000005     0        0 5 2 0 160 4 30 1 7
"""
_TABLE_6 = """\
  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm
   0: B80D0120000000000000000001000000:1F90 B80D0120000000000000000002000000:C350 01 00000009:00000000 01:00000040 0000000A     0        0 6 2 0 160 4 30 1 7
   1: 0000000000000000FFFF00000900000A:1F90 0000000000000000FFFF00000800000A:C350 01 00000009:00000000 01:00000040 00000004     0        0 7 2 0 160 4 30 1 7
"""  # noqa: E501


def test_what_the_kernel_sends_again_and_again_has_no_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "gpu07")
    tables = [tmp_path / "tcp", tmp_path / "tcp6", tmp_path / "none"]
    tables[0].write_text(_TABLE)
    tables[1].write_text(_TABLE_6)
    assert network.read_established_connections(tables) == NodeConnections(
        "gpu07", ("10.0.0.1", "10.0.0.9", "2001:db8::1"), ("10.0.0.3", "10.0.0.8", "2001:db8::2")
    )


def test_pairs_are_named_once_and_only_of_nodes_of_the_job():
    nodes = [
        NodeConnections("a", ("10.0.0.1", "127.0.0.1"), ("10.0.0.2", "10.9.9.9", "10.0.0.1")),
        NodeConnections("b", ("10.0.0.2",), ("10.0.0.1",)),
        NodeConnections("c", ("10.0.0.3", "10.0.1.3"), ()),
        NodeConnections("d", ("10.0.0.4",), ("10.0.1.3",)),
    ]
    assert find_cut_pairs(nodes) == [("a", "b"), ("c", "d")]
    assert find_cut_pairs(nodes[2:3]) == find_cut_pairs([]) == []
    assert describe_pairs([("a", "b")] * 6) == "a and b, a and b, a and b, a and b, and 2 more pairs"


@pytest.fixture
def routed() -> Iterator[list[str]]:
    """The network namespaces of two nodes and of the router between them."""
    names = [f"mcore-bundle-{os.getpid()}-{name}" for name in ("node0", "node1", "router")]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, timeout=30, capture_output=True)

    with ExitStack() as cleanup:
        try:
            for name in names:
                ip("netns", "add", name)
                cleanup.callback(ip, "netns", "delete", name)
                ip("-n", name, "link", "set", "lo", "up")
            for number, name in enumerate(names[:2]):
                ip(
                    "-n",
                    name,
                    "link",
                    "add",
                    "eth0",
                    "type",
                    "veth",
                    "peer",
                    f"eth{number}",
                    "netns",
                    names[2],
                )
                for inside, device, host in ((name, "eth0", 2), (names[2], f"eth{number}", 1)):
                    ip("-n", inside, "address", "add", f"10.213.{number}.{host}/24", "dev", device)
                    ip("-n", inside, "link", "set", device, "up")
                ip("-n", name, "route", "add", "default", "via", f"10.213.{number}.1")
            forward(names[2], 1)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces can be made: {error.stderr}")
        yield names


def forward(router: str, enabled: int) -> None:
    """Let a router forward packets, or drop them."""
    script = f"echo {enabled} >/proc/sys/net/ipv4/ip_forward"
    subprocess.run(["ip", "netns", "exec", router, "sh", "-ec", script], check=True, timeout=30)


@pytest.mark.skipif(not HAS_NAMESPACES, reason="needs root, and ip")
@pytest.mark.world
@pytest.mark.slow
def test_a_network_that_fails_between_two_nodes_is_named_with_both(tmp_path, monkeypatch, routed):
    world = tmp_path / "world"
    monkeypatch.setenv("TEST_WORLD", str(world))
    monkeypatch.setenv("TEST_PORT", "29401")
    launched = []
    for rank in range(2):
        node(monkeypatch, rank, "10.213.0.2", 29400)
        (tmp_path / str(rank)).mkdir()
        within = ("ip", "netns", "exec", routed[rank])
        launched.append(start(tmp_path / str(rank), WORKER, "talk", within=within))
    deadline = time.monotonic() + 60
    while len(list(world.glob("ready-*"))) < 4:
        assert time.monotonic() < deadline and {each.poll() for each in launched} == {None}
        time.sleep(0.05)
    forward(routed[2], 0)
    (world / "cut").touch()
    for rank, process in enumerate(launched):
        _, err = finish(process, 6, SECONDS)
        values = read_verdict(tmp_path / str(rank))
        assert (values["kind"], values["action"], values["code"]) == ("network", "restart", 6)
        assert "network" in values["cause"] and "node0 and node1" in values["cause"]
        assert (values["node"], values["rank"]) == ("node0, node1", None)
        assert err.splitlines()[-1] == values["sentence"]
        assert {line[:6] for line in values["evidence"][1:]} == {"rank 0", "rank 1", "rank 2", "rank 3"}
        assert gone([outcome.pid for outcome in outcomes.read(Path(tmp_path, str(rank), "logs"))])
