"""Two containers are two nodes: they find each other by name, train as one, and go on after one was lost."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.images import containers
from tests.images.containers import HOME, Container
from tests.runs import numbers
from tests.vision import rows

pytestmark = pytest.mark.images

SETS = ("train.steps=40", "optimizer.warmup_steps=5", "train.eval_batches=1", "train.eval_interval=0",
        "train.log_interval=1", "checkpoint.interval=5", "train.micro_batch_size=2",
        "train.global_batch_size=4")  # fmt: skip
JOB = ("train", "demo", *(f"--set={override}" for override in SETS))
FEW = (*SETS, "train.steps=6", "train.micro_batch_size=4", "train.global_batch_size=8")
RECIPES = {
    "MTP and FP8": ("demo", *FEW, "model.dtype=bf16", "model.fp8={scaling: blockwise}"),
    "images": (
        "/data/digits.yaml",
        *rows.overrides(Path("/data/shown"), *FEW, "parallel.tp=2", "checkpoint.export=null", "name=demo"),
    ),
}


@contextmanager
def two_nodes(
    engine, image: str, home: str, job: Sequence[str] = JOB, mounts: Sequence[str] = ()
) -> Iterator[tuple[Container, Container]]:
    """Both nodes of the job, node 1 first: a scheduler promises no order, nor that a name exists yet."""
    with containers.network(engine) as network, ExitStack() as held:
        options = (f"--network={network}", f"--volume={home}:{HOME}", *mounts)

        def node(rank: int) -> Container:
            words = (*job, "--nodes=2", f"--node-rank={rank}", "--rendezvous=node-0:29500")
            own = (f"--hostname=node-{rank}", f"--network-alias=node-{rank}")
            made = containers.started(engine, image, *words, options=(*options, *own))
            return held.enter_context(made)

        second = node(1)
        yield node(0), second


def learned(engine, image: str, home: str) -> list[dict]:
    """What the run in the volume noted of what it learned."""
    cat = ("-c", f"cat {HOME}/runs/demo/metrics.jsonl")
    result = containers.run(engine, image, *cat, options=("--entrypoint=sh", f"--volume={home}:{HOME}"))
    return numbers.learned(result.out)


def on_one(engine, image: str, job: Sequence[str], mounts: Sequence[str] = ()) -> list[dict]:
    """What a run on one node learns."""
    with containers.volume(engine) as home:
        options = ("--network=none", f"--volume={home}:{HOME}", *mounts)
        with containers.started(engine, image, *job, options=options) as node:
            assert node.wait() == 0, node.logs()
        return learned(engine, image, home)


@pytest.fixture(scope="module")
def alone(engine, cpu) -> list[dict]:
    """What the job learns on one node."""
    return on_one(engine, cpu, JOB)


@pytest.fixture(scope="module")
def mounted(tmp_path_factory) -> str:
    """The recipe of the digits and rows with images, to be mounted."""
    directory = tmp_path_factory.mktemp("mounted")
    names = [f"images/{number}.png" for number in range(8)]
    given = [rows.asking(f"<image>{'?' * n}", str(n), images=[name]) for n, name in enumerate(names)]
    files = {name: rows.content(rows.image(16, 16, seed)) for seed, name in enumerate(names)}
    rows.write(directory / "shown", given, files)
    (directory / "digits.yaml").write_text(rows.RECIPE.read_text())
    directory.chmod(0o755)
    return f"--volume={directory}:/data:ro"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_learns_on_two_nodes_what_it_does_on_one(engine, cpu, mounted, recipe):
    job = ("train", RECIPES[recipe][0], *(f"--set={override}" for override in RECIPES[recipe][1:]))
    with containers.volume(engine) as home:
        with two_nodes(engine, cpu, home, job, [mounted]) as nodes:
            assert [node.wait() for node in nodes] == [0, 0], "\n".join(node.logs() for node in nodes)
        found = learned(engine, cpu, home)
    assert len(found) >= 6 and found == on_one(engine, cpu, job, [mounted])


def test_two_nodes_learn_what_one_does(engine, cpu, alone):
    with containers.volume(engine) as home:
        with two_nodes(engine, cpu, home) as nodes:
            assert [node.wait() for node in nodes] == [0, 0], "\n".join(node.logs() for node in nodes)
        assert learned(engine, cpu, home) == alone


def test_a_lost_node_ends_the_other_and_the_set_goes_on_from_the_checkpoint(engine, cpu, alone):
    with containers.volume(engine) as home:
        with two_nodes(engine, cpu, home) as (first, second):
            first.wait_for("step  7/40")
            engine.docker("kill", second.name)
            assert first.wait(60) == 1, first.logs()
        with two_nodes(engine, cpu, home) as nodes:
            assert [node.wait() for node in nodes] == [0, 0], "\n".join(node.logs() for node in nodes)
            assert "after step" in nodes[0].logs()
        assert learned(engine, cpu, home) == alone


def test_sigterm_of_one_node_ends_both_with_75(engine, cpu, alone):
    with containers.volume(engine) as home:
        with two_nodes(engine, cpu, home) as (first, second):
            first.wait_for("step  3/40")
            engine.docker("stop", "--time=60", second.name, seconds=90)
            assert [node.wait(60) for node in (first, second)] == [75, 75], first.logs() + second.logs()
        with two_nodes(engine, cpu, home) as nodes:
            assert [node.wait() for node in nodes] == [0, 0], "\n".join(node.logs() for node in nodes)
        assert learned(engine, cpu, home) == alone
