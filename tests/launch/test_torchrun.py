import shlex
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundle.launch.command import Command, Launch, build_command, format_dry_run
from bundle.launch.rendezvous import Rendezvous, discover
from tests.launch.launched import common

GOLDEN = Path(__file__).parent / "golden"
ONE = discover({})
TWO, OTHER = (discover({}, nodes=2, node_rank=node, endpoint="[fe80::1]:29500") for node in (0, 1))
HOSTILE = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


def launch(rendezvous: Rendezvous, *arguments: str, per_node: int = 2, **changes) -> Launch:
    logs = Path(f"runs/demo/logs/node-{rendezvous.node_rank}/1")
    table = common(rendezvous.nodes)
    changes = table | changes | {"environment": table["environment"] | changes.get("environment", {})}
    return Launch(arguments, rendezvous, per_node, logs, python="python", **changes)


@pytest.mark.parametrize(
    ("name", "what", "inherited"),
    [
        ("one-node", [launch(ONE, "train", "demo", "--set", "name=it's $me")], {}),
        (
            "two-nodes",
            [launch(node, "train", "demo", per_node=8) for node in (TWO, OTHER)],
            {"OMP_NUM_THREADS": "4", "PET_NNODES": "2"},
        ),
        (
            "environment",
            [
                launch(
                    ONE,
                    "train",
                    "demo",
                    per_node=1,
                    environment={"HF_TOKEN": "hf_x", "HCCL_CONNECT_TIMEOUT": "1800"},
                )
            ],
            {"GLOO_SOCKET_IFNAME": "eth0"},
        ),
    ],
)
def test_the_dry_run_is_the_golden_file(name, what, inherited):
    assert format_dry_run(what, inherited) == (GOLDEN / f"{name}.txt").read_text()


def test_what_the_dry_run_prints_is_what_runs():
    what = launch(TWO, "train", "a b", "'", "$x")
    printed = shlex.split(format_dry_run([what], {"PET_RDZV_ID": "x"}).splitlines()[1])
    made = build_command(what, {"PET_RDZV_ID": "x"})
    expected = ["env", "--unset=PET_RDZV_ID", *(f"{k}={v}" for k, v in made.variables), *made.argv]
    assert printed == expected


def test_one_node_offers_nothing_to_other_machines():
    made = build_command(launch(ONE, "train"), {})
    assert "--rdzv-conf=store_type=file" in made.argv
    assert "--local-addr=127.0.0.1" in made.argv
    assert ("GLOO_SOCKET_IFNAME", "lo") in made.variables


@given(st.lists(HOSTILE, max_size=5))
def test_hostile_arguments_survive_torchrun_and_the_shell(arguments):
    made = build_command(launch(ONE, *arguments), {})
    words = shlex.split(made.to_redacted_shell())
    assert tuple(words[-len(made.argv) :]) == made.argv
    behind = made.argv[made.argv.index("-m", 3) + 2 :]
    assert [string.Template(a).safe_substitute(local_rank="0") for a in behind] == arguments


def test_torchrun_reads_the_command_as_it_was_meant():
    run = pytest.importorskip("torch.distributed.run")
    arguments = ["train", "--nnodes=9", "--", "-m", "x", "${local_rank}", "$$", ""]
    made = build_command(launch(TWO, *arguments), {})
    parsed = run.parse_args(list(made.argv[3:]))
    config, _, words = run.config_from_args(parsed)
    assert (config.min_nodes, config.nproc_per_node, config.rdzv_endpoint) == (2, 2, "[fe80::1]:29500")
    assert (config.max_restarts, config.monitor_interval, config.run_id) == (0, 0.1, "ranks")
    macros = pytest.importorskip("torch.distributed.elastic.utils.api").macros
    assert macros.substitute(words, "0") == ["-u", "-m", "bundle", *arguments]


def test_secrets_are_not_printed_but_reach_the_process():
    made = Command(("x",), (("WANDB_API_KEY", "abc"), ("KEY", "def"), ("MONKEY", "shown")))
    assert "abc" not in made.to_redacted_shell()
    assert "def" not in made.to_redacted_shell()
    assert "MONKEY=shown" in made.to_redacted_shell()
    assert made.build_environment({"WANDB_API_KEY": "old"})["WANDB_API_KEY"] == "abc"
