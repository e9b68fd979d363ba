"""`mcore-bundle launch kubernetes`: the options that only Kubernetes has."""

from typing import Annotated

import typer

from bundle.cli import options
from bundle.cli.launch.submission import decided, read_record
from bundle.cli.request import Machines, Request
from bundle.targets import kubernetes as objects


def kubernetes(
    recipe: options.Recipe,
    request: Request,
    machines: Machines,
    claim: Annotated[
        str, typer.Option(help="The PersistentVolumeClaim of the run directory, which all nodes see.")
    ],
    container_image: Annotated[str, typer.Option("--image", help="What every node runs.")],
    record: options.RunsIn = "",
    form: Annotated[
        str,
        typer.Option(
            callback=options.one_of(objects.FORMS),
            help="jobset starts all nodes again when one is lost; job ends, and needs nothing installed.",
        ),
    ] = objects.FORMS[0],
    name: Annotated[str, typer.Option(help="Of the objects; without it, the recipe's.")] = "",
    namespace: Annotated[str, typer.Option(help="Where they are made; without it, where kubectl is.")] = "",
    mounts: Annotated[
        list[str] | None,
        typer.Option("--mount", metavar="CLAIM:/PATH", help="Another claim, of data or of a model."),
    ] = None,
    resources: Annotated[
        list[str] | None,
        typer.Option(
            "--resource", metavar="NAME=QUANTITY", help="Of each node: memory=512Gi, cpu=64, rdma/ib=8, ..."
        ),
    ] = None,
    shared_memory: Annotated[str, typer.Option(metavar="QUANTITY", help="Size of /dev/shm.")] = "64Gi",
    rdma: Annotated[bool, typer.Option("--rdma", help="Let the pods pin memory for a network card.")] = False,
    secret: Annotated[str, typer.Option(help="A Secret whose keys become variables.")] = "",
    queue: Annotated[str, typer.Option(help="Of Kueue, which starts all pods or none.")] = "",
    topology: Annotated[str, typer.Option(help="The level that Kueue keeps all pods within.")] = "",
    priority: Annotated[str, typer.Option(help="A PriorityClass.")] = "",
    restarts: Annotated[int, typer.Option(min=0, help="How often a JobSet starts all nodes again.")] = 10,
    grace: Annotated[
        int, typer.Option(min=1, metavar="SECONDS", help="From being told to save to the end.")
    ] = 300,
) -> None:
    """Print the objects of a job, for `kubectl apply -f -`."""
    job = decided(recipe, request, machines, read_record(container_image, record))
    wanted = objects.Options(
        image=container_image,
        claim=claim,
        name=name,
        form=form,
        namespace=namespace,
        mounts=tuple(mounts or ()),
        resources=tuple(resources or ()),
        shared_memory=shared_memory,
        rdma=rdma,
        secret=secret,
        queue=queue,
        topology=topology,
        priority=priority,
        restarts=restarts,
        grace_seconds=grace,
    )
    print(objects.documents(job, wanted), end="")
