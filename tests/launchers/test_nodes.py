import socket

import pytest

from tests.launchers.launched import finish, start


@pytest.mark.world
def test_two_nodes_are_one_world_numbered_node_by_node(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_MASTER_ADDR", "localhost")
    monkeypatch.setenv("PET_MASTER_PORT", str(port))
    nodes = []
    # The second node first: nothing promises that the one where they meet is there already.
    for node in (1, 0):
        folder = tmp_path / str(node)
        folder.mkdir()
        monkeypatch.setenv("PET_NODE_RANK", str(node))
        nodes.append(start(folder, "tests.launchers.worker", "well"))
    assert [finish(node, 0) for node in nodes] == [("rank 2 of 4 []\n", ""), ("rank 0 of 4 []\n", "")]
