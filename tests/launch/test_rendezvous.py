import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundle.errors import UsageError
from bundle.launch.rendezvous import Rendezvous, discover
from tests.launch.environments import (
    ASCEND,
    INDEXED_JOB,
    KUBEFLOW,
    SLURM_BATCH,
    SLURM_NODE,
    SLURM_RANK,
    TORCHRUN,
)


def position(found: Rendezvous) -> tuple:
    return (found.nodes, found.node_rank, found.per_node, found.rank, found.local_rank, found.world_size)


@pytest.mark.parametrize(
    ("environment", "source", "expected", "where"),
    [
        (TORCHRUN, "torchrun", (2, 1, 4, 5, 1, 8), ("node1", 29511)),
        (KUBEFLOW, "pet", (2, 1, 8, None, None, None), ("job-node-0-0.job", 29400)),
        (SLURM_NODE, "slurm", (2, 1, None, None, None, None), ("gpu007", 20539)),
        (SLURM_RANK, "slurm", (2, 1, 4, 6, 2, 8), ("gpu007", 20539)),
        (SLURM_BATCH, "slurm", (1, 0, None, None, None, None), ("127.0.0.1", None)),
        (ASCEND, "ascend-operator", (2, 1, 8, None, None, None), ("10.0.0.9", 2222)),
        ({}, "none", (1, 0, None, None, None, None), ("127.0.0.1", None)),
    ],
)
def test_each_starter_is_understood(environment, source, expected, where):
    found = discover(environment)
    assert (found.source, position(found), (found.address, found.port)) == (source, expected, where)
    assert found.is_rank == (expected[3] is not None)


def test_torchrun_inside_another_starter_is_what_counts():
    for around in (KUBEFLOW, SLURM_NODE, INDEXED_JOB):
        assert position(discover({**around, **TORCHRUN})) == position(discover(TORCHRUN))


def test_torchrun_variables_without_the_group_are_enough():
    by_hand = {k: v for k, v in TORCHRUN.items() if not k.startswith(("GROUP_", "TORCHELASTIC"))}
    assert position(discover(by_hand)) == position(discover(TORCHRUN))


def test_flags_describe_several_nodes():
    found = discover({}, nodes=4, node_rank=3, endpoint="[fe80::1]:29500")
    assert position(found) == (4, 3, None, None, None, None)
    assert (found.source, found.address, found.port) == ("flags", "fe80::1", 29500)


def test_flags_fill_what_an_indexed_job_does_not_say():
    found = discover(INDEXED_JOB, nodes=4, endpoint="job-0.svc:29500")
    assert (found.source, found.nodes, found.node_rank, found.address) == (
        "kubernetes-job",
        4,
        3,
        "job-0.svc",
    )


def test_a_rendezvous_flag_wins_over_the_address_of_an_operator():
    found = discover(ASCEND, endpoint="10.9.9.9:5000")
    assert (found.address, found.port) == ("10.9.9.9", 5000)


def test_one_node_meets_on_loopback_whatever_was_said():
    found = discover({**KUBEFLOW, "PET_NNODES": "1", "PET_NODE_RANK": "0", "JOB_COMPLETION_INDEX": "0"})
    assert (found.address, found.port) == ("127.0.0.1", None)
    assert discover({}, nodes=1, endpoint="10.0.0.1:29500").address == "127.0.0.1"


def test_kubeflow_without_its_node_rank_takes_the_index_of_the_pod():
    without = {k: v for k, v in KUBEFLOW.items() if k != "PET_NODE_RANK"}
    assert discover(without).node_rank == 1


def test_a_shell_inside_an_allocation_of_several_nodes_must_say_what_it_means(messages):
    shell = {**SLURM_BATCH, "SLURM_NNODES": "2"}
    with pytest.raises(UsageError, match="SLURM_NNODES=2") as refused:
        discover(shell)
    messages(refused.value)
    assert discover(shell, nodes=1).nodes == 1


@pytest.mark.parametrize(
    ("environment", "flags", "named"),
    [
        ({**TORCHRUN, "RANK": "8"}, {}, ["RANK=8", "WORLD_SIZE=8"]),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, {}, ["LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4"]),
        (
            {**TORCHRUN, "WORLD_SIZE": "7"},
            {},
            ["WORLD_SIZE=7", "GROUP_WORLD_SIZE=2", "LOCAL_WORLD_SIZE=4"],
        ),
        ({**TORCHRUN, "RANK": "2"}, {}, ["RANK=2", "GROUP_RANK=1", "LOCAL_RANK=1"]),
        (TORCHRUN, {"nodes": 3}, ["--nodes=3", "GROUP_WORLD_SIZE=2"]),
        (TORCHRUN, {"node_rank": 0}, ["--node-rank=0", "GROUP_RANK=1"]),
        ({**KUBEFLOW, "JOB_COMPLETION_INDEX": "0"}, {}, ["PET_NODE_RANK=1", "JOB_COMPLETION_INDEX=0"]),
        ({**SLURM_NODE, "PET_NNODES": "5"}, {}, ["PET_NNODES=5", "SLURM_STEP_NUM_NODES=2"]),
        ({**SLURM_RANK, "SLURM_PROCID": "5"}, {}, ["SLURM_PROCID=5", "SLURM_NODEID=1"]),
        ({**SLURM_NODE, "SLURM_STEP_TASKS_PER_NODE": "2,1"}, {}, ["SLURM_STEP_TASKS_PER_NODE='2,1'"]),
        ({**ASCEND, "LOCAL_RANK": "0,1"}, {}, ["LOCAL_RANK", "LOCAL_WORLD_SIZE=8"]),
        ({**ASCEND, "WORLD_SIZE": "15"}, {}, ["WORLD_SIZE=15", "LOCAL_WORLD_SIZE=8"]),
        ({**KUBEFLOW, "PET_NNODES": "1:4"}, {}, ["PET_NNODES='1:4'"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, {}, ["LOCAL_RANK"]),
        (INDEXED_JOB, {}, ["JOB_COMPLETION_INDEX", "--nodes"]),
        (INDEXED_JOB, {"nodes": 3}, ["JOB_COMPLETION_INDEX=3", "--nodes=3"]),
        ({}, {"nodes": 2}, ["--node-rank", "--rendezvous HOST:PORT"]),
        ({}, {"nodes": 2, "node_rank": 2, "endpoint": "a:1"}, ["--node-rank=2", "--nodes=2"]),
        ({}, {"nodes": 0}, ["--nodes 0"]),
        ({**TORCHRUN, "MASTER_PORT": "70000", "RANK": "-1"}, {}, ["MASTER_PORT='70000'", "RANK='-1'"]),
        ({**TORCHRUN, "MASTER_PORT": ""}, {}, ["MASTER_PORT"]),
    ],
)
def test_contradictions_name_both_sides_and_all_are_said(environment, flags, named, messages):
    with pytest.raises(UsageError) as refused:
        discover(environment, **flags)
    messages("\n".join(refused.value.violations))
    for words in named:
        assert words in str(refused.value)


HOSTILE = st.one_of(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1),
    st.sampled_from(
        ["-oProxyCommand=x", "$(reboot)", "a b", "a;b", "١", "1_0", "+1", " 1", "1e3", "0x1", "9" * 400]
    ),
)
KEYS = sorted({*TORCHRUN, *KUBEFLOW, *SLURM_RANK, *ASCEND} - {"TORCHELASTIC_RUN_ID"})


@given(st.dictionaries(st.sampled_from(KEYS), HOSTILE | st.sampled_from(["0", "1", "2", "host"]), max_size=6))
def test_any_environment_is_understood_or_refused_with_a_usage_error(changes):
    for base in (TORCHRUN, KUBEFLOW, SLURM_RANK, SLURM_NODE, ASCEND, {}):
        try:
            found = discover({**base, **changes})
        except UsageError as refused:
            assert refused.violations
            continue
        assert 0 <= found.node_rank < found.nodes
        assert found.port is None or 0 < found.port < 65536
        assert not found.address.startswith("-")
        assert not set(found.address) & set(" ;$()`'\"\\\n/")
        if found.is_rank:
            assert found.world_size == found.nodes * (found.per_node or 0)
            assert found.rank == found.node_rank * (found.per_node or 0) + (found.local_rank or 0)


@given(st.integers(1, 64), st.integers(1, 16), st.data())
def test_every_rank_of_every_world_finds_itself(nodes, per_node, data):
    rank = data.draw(st.integers(0, nodes * per_node - 1))
    node, local = divmod(rank, per_node)
    world = {
        "WORLD_SIZE": nodes * per_node,
        "LOCAL_WORLD_SIZE": per_node,
        "MASTER_ADDR": "h",
        "MASTER_PORT": 1,
    }
    found = discover({k: str(v) for k, v in (world | {"RANK": rank, "LOCAL_RANK": local}).items()})
    assert position(found) == (nodes, node, per_node, rank, local, nodes * per_node)
