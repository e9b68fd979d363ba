"""`mcore-bundle weights`: checks, conversion and comparison of weights of Hugging Face and megatron."""

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
from bundle.pretrained.replacing import refuse_overlap_and_foreign_files
from bundle.pretrained.writing import WEIGHT_NUMBER_FORMATS, PublishedModel
from bundle.recipe import Recipe, load

if TYPE_CHECKING:
    from bundle.mcore.torch_dist import TorchDistCheckpoint
    from bundle.models.conversion import TensorSource

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    help="Check, export, import or compare weights of Hugging Face and Megatron.",
)


@app.callback()
def silence_megatron_warnings() -> None:
    """Silence megatron's warnings about kernels that are not installed, as weights need none."""
    warnings.filterwarnings("ignore", module=r"megatron\.")


HuggingFace = Annotated[Path, typer.Argument(metavar="DIR", help="A Hugging Face directory.")]
Out = Annotated[
    Path, typer.Argument(help="The directory to write; it is replaced when the new one is complete.")
]
MTPLayers = Annotated[
    int | None, typer.Option(min=0, help="Use this number of MTP layers. Default: its config's number.")
]
Force = Annotated[
    bool, typer.Option("--force", help="Replace OUT and everything in it, even if other programs wrote it.")
]


@app.command()
def check(
    directory: HuggingFace,
    recipe: Annotated[
        str, typer.Argument(help="Check for this recipe's model. Default: config.json's model.")
    ] = "",
    mtp_layers: MTPLayers = None,
    headers: Annotated[bool, typer.Option("--headers", help="Read only headers, not values.")] = False,
) -> None:
    """Name tensors that are missing, extra, of another shape, truncated, NaN or infinite."""
    if recipe:
        if mtp_layers is not None:
            raise UsageError("--mtp-layers: leave it out, because the recipe sets it (model.mtp.layers)")
        job = load(recipe)
        weights, architecture = pretrained.find_compatible_weights(job, directory), job.architecture
    else:
        config, architecture = _read_model(directory, mtp_layers)
        weights = pretrained.find_model_weights(directory, config, architecture)
    values = "values were not read (torch is not installed)"
    if headers:
        values = "values were not read"
    elif importlib.util.find_spec("torch") is not None:
        from bundle.architectures.tensors import Tensors
        from bundle.models.finite_check import refuse_nonfinite_weights

        refuse_nonfinite_weights(weights)
        pretrained.refuse_unequal_copies(weights, Tensors(architecture).map_copies())
        values = "every value is finite"
    print(f"{weights}; these are exactly the tensors of this {architecture.model_type} model; {values}")


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
            help="Take config and tokenizer from this Hugging Face directory. Default: the one that the"
            " run's recipe names.",
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            callback=options.allow_only(WEIGHT_NUMBER_FORMATS),
            help=f"Choose one of {', '.join(WEIGHT_NUMBER_FORMATS)}. Default: the recipe's, else bf16.",
        ),
    ] = "",
    force: Force = False,
) -> None:
    """Write a checkpoint, of any layout, as a Hugging Face directory."""
    refuse_overlap_and_foreign_files(out, [checkpoint, like] if like else [checkpoint], force=force)
    checkpoint_directory, job = find_checkpoint(checkpoint, like, verified=True)
    _refuse_adapters(checkpoint_directory, job)
    if like is not None:
        model = (
            _read_published_with_mtp_layers(like, checkpoint_directory)
            if job is None
            else PublishedModel(
                job.model.config, job.architecture, like, (like,), like, job.data.custom_template_text
            )
        )
    elif job is not None:
        model = PublishedModel.from_recipe(job)
    else:
        raise UsageError(
            f"{checkpoint}: not a run of mcore-bundle. Name a directory with its config and tokenizer with"
            " --like DIR"
        )
    if like is None and model.missing_tokenizer_reason:
        raise UsageError(
            f"{checkpoint}: the export would lack the run's tokenizer: {model.missing_tokenizer_reason}."
            " Put the tokenizer back, or export in the directory where the run was started. Or name a"
            " directory with config and tokenizer with --like DIR"
        )
    refuse_overlap_and_foreign_files(out, model.source_directories, force=force)
    dtype_name = dtype or (job.model.dtype if job else "bf16")
    from bundle.models import conversion

    conversion.write_full_hugging_face_model(
        checkpoint_directory,
        model,
        out,
        next(known for known in WEIGHT_NUMBER_FORMATS if known == dtype_name),
    )
    print(out)


@app.command("import")
def import_(
    directory: HuggingFace,
    out: Out,
    mtp_layers: MTPLayers = None,
    force: Force = False,
) -> None:
    """Write a checkpoint that Megatron-LM loads (--ckpt-format torch_dist), in any layout."""
    refuse_overlap_and_foreign_files(out, [directory], force=force)
    config, architecture = _read_model(directory, mtp_layers)
    weights = pretrained.find_model_weights(directory, config, architecture)
    from bundle.architectures.tensors import Tensors
    from bundle.models import conversion

    conversion.to_torch_dist(weights, Tensors(architecture), out)
    print(out)


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(help="A Hugging Face directory, a run or a checkpoint.")],
    second: Annotated[Path, typer.Argument(help="The other one.")],
    as_json: options.JSON_OPTION = False,
) -> None:
    """Compare two models tensor by tensor: names, shapes, dtypes, values; ends with 1 where they differ."""
    from bundle.models.conversion import find_differences

    first_source, second_source = (
        _open_comparable_tensors(first, second),
        _open_comparable_tensors(second, first),
    )
    difference_count = 0
    for difference in find_differences(first_source, second_source):
        difference_count += 1
        print(json.dumps(asdict(difference)) if as_json else difference)
    tensor_count = len({*first_source.tensors, *second_source.tensors})
    if not as_json:
        print(
            f"tensors that differ: {difference_count} of {tensor_count}"
            if difference_count
            else f"all tensors are equal: {tensor_count}"
        )
    if difference_count:
        raise typer.Exit(int(ExitCode.JOB_FAILED))


def find_checkpoint(
    path: Path, like: Path | None = None, *, verified: bool
) -> tuple["TorchDistCheckpoint", Recipe | None]:
    """Return a checkpoint's tensors, and the recipe of its run, if the run is one of ours."""
    refuse_missing_directory(path)
    from bundle.checkpoints import manifest
    from bundle.checkpoints.directory import MEGATRON_FOLDER
    from bundle.errors import JobFailed
    from bundle.mcore.torch_dist import TorchDistCheckpoint
    from bundle.models.conversion import resolve_tracked_checkpoint
    from bundle.runs.directory import RunDirectory, find_newest_checkpoint

    step = find_newest_checkpoint(path)
    if step is None:
        return TorchDistCheckpoint(resolve_tracked_checkpoint(path)), None
    if verified and (reasons := manifest.find_damage(step)):
        raise JobFailed(f"{step}: this checkpoint cannot be used", reasons)
    recipe = RunDirectory(step.absolute().parents[1]).recipe
    overrides = [] if like is None else [f"model.path={json.dumps(str(like))}"]
    job = load(str(recipe), overrides) if recipe.is_file() else None
    return TorchDistCheckpoint(step / MEGATRON_FOLDER), job


def refuse_missing_directory(path: Path) -> None:
    """Raise UsageError where there is no such directory."""
    if not files.is_directory(path):
        raise UsageError(f"{path}: there is no such directory")


def _refuse_adapters(checkpoint: "TorchDistCheckpoint", job: Recipe | None) -> None:
    """Raise UsageError for a checkpoint that holds adapters instead of weights."""
    if job is not None and job.model.lora is not None:
        raise UsageError(
            f"{checkpoint.root.parent} holds only the adapters of model.lora. Let the run write the model"
            f" or its adapters: set checkpoint.export to hf or peft"
        )


def _read_model(directory: Path, mtp_layers: int | None) -> tuple[Mapping[str, Any], Architecture]:
    """Return the config of a directory and its model; `mtp_layers` limits the model's MTP layers."""
    config = read_config(directory)
    architecture = from_config(config, str(directory / "config.json"))
    if mtp_layers is None:
        return config, architecture
    if mtp_layers > architecture.mtp_layers:
        raise UsageError(
            f"--mtp-layers {mtp_layers}: {directory / 'config.json'} has only {architecture.mtp_layers}"
        )
    return config, replace(architecture, mtp_layers=mtp_layers)


def _read_published_with_mtp_layers(like: Path, checkpoint: "TorchDistCheckpoint") -> PublishedModel:
    """Return the model of a Hugging Face directory, with the MTP layers of a checkpoint."""
    config = read_config(like)
    architecture = from_config(config, str(like / "config.json"))
    return PublishedModel(
        config, replace(architecture, mtp_layers=checkpoint.mtp_layers), like, (like,), like
    )


def _open_comparable_tensors(path: Path, other: Path) -> "TensorSource":
    """Return the tensors of a directory.

    Tensors of a checkpoint get their published names where the other directory has those.
    """
    from bundle.architectures.tensors import Tensors
    from bundle.models.conversion import (
        HuggingFaceDirectoryTensors,
        TorchDistMegatronTensors,
        TorchDistPublishedTensors,
    )

    if (weights := pretrained.find_weights_ignoring_architecture(path)) is not None:
        return HuggingFaceDirectoryTensors(weights)
    checkpoint, job = find_checkpoint(path, None, verified=False)
    _refuse_adapters(checkpoint, job)
    other_weights = pretrained.find_weights_ignoring_architecture(other)
    if other_weights is None:
        return TorchDistMegatronTensors(checkpoint)
    table = Tensors(_read_published_with_mtp_layers(other, checkpoint).architecture)
    copies = [copy for copy in table.map_copies() if copy in other_weights.entries]
    return TorchDistPublishedTensors(checkpoint, Tensors(table.architecture, written_copies=copies))
