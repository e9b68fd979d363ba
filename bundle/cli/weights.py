"""`mcore-bundle weights`: a model's weights between Hugging Face and megatron, looked at and compared."""

import importlib.util
import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bundle import files, pretrained
from bundle.architectures import Architecture, from_config, read_config
from bundle.cli import options
from bundle.errors import ExitCode, UsageError
from bundle.pretrained.replacing import refuse
from bundle.pretrained.writing import NUMBERS, Published
from bundle.recipe import Recipe, load

if TYPE_CHECKING:
    from bundle.mcore.torch_dist import Directory
    from bundle.models.conversion import Source

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    help="Weights between Hugging Face and megatron: check, export, import, diff.",
)


@app.callback()
def quiet() -> None:
    """Megatron tells of kernels that are not installed when it is imported; weights need none."""
    warnings.filterwarnings("ignore", module=r"megatron\.")


HuggingFace = Annotated[Path, typer.Argument(metavar="DIR", help="A Hugging Face directory.")]
Out = Annotated[
    Path, typer.Argument(help="The directory to write; it is replaced when the new one is whole.")
]
MTPLayers = Annotated[
    int | None,
    typer.Option(min=0, help="How many of its MTP layers count; without it, as many as its config says."),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Replace OUT with all that is in it, be it not written by these verbs."),
]


@app.command()
def check(
    directory: HuggingFace,
    recipe: Annotated[
        str, typer.Argument(help="Whose model it is to be; without it, that of its config.json.")
    ] = "",
    mtp_layers: MTPLayers = None,
    headers: Annotated[bool, typer.Option("--headers", help="Look at headers alone, not at values.")] = False,
) -> None:
    """Name tensors that are missing, extra, of another shape, truncated, NaN or infinite."""
    if recipe:
        if mtp_layers is not None:
            raise UsageError("--mtp-layers: a recipe says it itself (model.mtp.layers)")
        job = load(recipe)
        found, architecture = pretrained.of_another_directory(job, directory), job.architecture
    else:
        config, architecture = _model(directory, mtp_layers)
        found = pretrained.of_directory(directory, config, architecture)
    values = "values were not read (torch is not installed)"
    if headers:
        values = "values were not read"
    elif importlib.util.find_spec("torch") is not None:
        from bundle.architectures.tensors import Tensors
        from bundle.models.finite import refuse_damaged

        refuse_damaged(found)
        pretrained.refuse_unequal(found, Tensors(architecture).copies())
        values = "every value is finite"
    print(f"{found}: all of this {architecture.model_type} model, and no others; {values}")


@app.command("export")
def export_(
    checkpoint: Annotated[
        Path,
        typer.Argument(help="A run, one of its checkpoints, or a torch_dist directory of megatron's."),
    ],
    out: Out,
    like: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where config and tokenizer are taken from: a Hugging Face directory. Without it, what the"
            " run's recipe names.",
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            callback=options.one_of(NUMBERS),
            help=f"One of {', '.join(NUMBERS)}; without it, the recipe's, else bf16.",
        ),
    ] = "",
    force: Force = False,
) -> None:
    """Write a checkpoint, of any layout, as a Hugging Face directory."""
    refuse(out, [checkpoint, like] if like else [checkpoint], force=force)
    found, job = checkpoint_of(checkpoint, like, verified=True)
    _refuse_adapters(found, job)
    if like is not None:
        model = (
            _as(like, found)
            if job is None
            else Published(job.model.config, job.architecture, like, (like,), like, job.data.template_text)
        )
    elif job is not None:
        model = Published.of(job)
    else:
        raise UsageError(f"{checkpoint}: no run of ours: say with --like DIR which model it is")
    if like is None and model.lacks:
        raise UsageError(
            f"{checkpoint}: the tokenizer of its run would be left out: {model.lacks}; put it back, call this"
            " where the run was begun, or say with --like DIR where config and tokenizer are"
        )
    refuse(out, model.sources, force=force)
    numbers = dtype or (job.model.dtype if job else "bf16")
    from bundle.models import conversion

    conversion.to_hugging_face(found, model, out, next(one for one in NUMBERS if one == numbers))
    print(out)


@app.command("import")
def import_(
    directory: HuggingFace,
    out: Out,
    mtp_layers: MTPLayers = None,
    force: Force = False,
) -> None:
    """Write a checkpoint that Megatron-LM loads (--ckpt-format torch_dist), in any layout."""
    refuse(out, [directory], force=force)
    config, architecture = _model(directory, mtp_layers)
    weights = pretrained.of_directory(directory, config, architecture)
    from bundle.architectures.tensors import Tensors
    from bundle.models import conversion

    conversion.to_torch_dist(weights, Tensors(architecture), out)
    print(out)


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(help="A Hugging Face directory, a run or a checkpoint.")],
    second: Annotated[Path, typer.Argument(help="Another one.")],
    as_json: options.JSON = False,
) -> None:
    """Compare two models tensor by tensor: names, shapes, dtypes, values; ends with 1 where they differ."""
    from bundle.models.conversion import differences

    one, other = _source(first, second), _source(second, first)
    found = 0
    for difference in differences(one, other):
        found += 1
        print(json.dumps(asdict(difference)) if as_json else difference)
    count = len({*one.tensors, *other.tensors})
    if not as_json:
        print(f"{found} of {count} tensors differ" if found else f"{count} tensors are equal")
    if found:
        raise typer.Exit(int(ExitCode.JOB_FAILED))


def checkpoint_of(
    named: Path, like: Path | None = None, *, verified: bool
) -> tuple["Directory", Recipe | None]:
    """A checkpoint's tensors, and the recipe of the run that it is of, where it is one of ours."""
    refuse_missing(named)
    from bundle.checkpoints import manifest
    from bundle.checkpoints.directory import MEGATRON
    from bundle.errors import JobFailed
    from bundle.mcore.torch_dist import Directory
    from bundle.models.conversion import newest
    from bundle.runs.directory import RunDirectory, newest_checkpoint

    step = newest_checkpoint(named)
    if step is None:
        return Directory(newest(named)), None
    if verified and (reasons := manifest.damage(step)):
        raise JobFailed(f"{step}: this checkpoint cannot be used", reasons)
    recipe = RunDirectory(step.absolute().parents[1]).recipe
    overrides = [] if like is None else [f"model.path={json.dumps(str(like))}"]
    job = load(str(recipe), overrides) if recipe.is_file() else None
    return Directory(step / MEGATRON), job


def refuse_missing(named: Path) -> None:
    """Raise UsageError for a name that no directory has."""
    if not files.is_directory(named):
        raise UsageError(f"{named}: there is no such directory")


def _refuse_adapters(checkpoint: "Directory", job: Recipe | None) -> None:
    """Raise UsageError for a checkpoint that holds adapters in the place of weights."""
    if job is not None and job.model.lora is not None:
        raise UsageError(
            f"{checkpoint.root.parent} holds the adapters of model.lora and no weights: have the run write"
            " the model, or its adapters, itself (checkpoint.export: hf or peft)"
        )


def _model(directory: Path, mtp_layers: int | None) -> tuple[Mapping[str, Any], Architecture]:
    """The config of a directory, and the model that it describes, of whose MTP layers so many count."""
    config = read_config(directory)
    found = from_config(config, str(directory / "config.json"))
    if mtp_layers is None:
        return config, found
    if mtp_layers > found.mtp_layers:
        raise UsageError(f"--mtp-layers {mtp_layers}: {directory / 'config.json'} names {found.mtp_layers}")
    return config, replace(found, mtp_layers=mtp_layers)


def _as(like: Path, checkpoint: "Directory") -> Published:
    """What a Hugging Face directory says of a model that has the MTP layers of a checkpoint."""
    config = read_config(like)
    architecture = from_config(config, str(like / "config.json"))
    return Published(config, replace(architecture, mtp_layers=checkpoint.mtp_layers), like, (like,), like)


def _source(named: Path, other: Path) -> "Source":
    """The tensors of a directory; those of a checkpoint by their published names where the other has such."""
    from bundle.architectures.tensors import Tensors
    from bundle.models.conversion import AsPublished, HuggingFace, Megatron

    if (weights := pretrained.opened(named)) is not None:
        return HuggingFace(weights)
    checkpoint, job = checkpoint_of(named, None, verified=False)
    _refuse_adapters(checkpoint, job)
    theirs = pretrained.opened(other)
    if theirs is None:
        return Megatron(checkpoint)
    table = Tensors(_as(other, checkpoint).architecture)
    copies = [copy for copy in table.copies() if copy in theirs.entries]
    return AsPublished(checkpoint, Tensors(table.architecture, written_copies=copies))
