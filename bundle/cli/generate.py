"""`mcore-bundle generate`: what a trained model answers."""

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from bundle import files
from bundle.cli import options, weights
from bundle.errors import UsageError
from bundle.pretrained.writing import Published

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def generate(
    model: Annotated[
        Path, typer.Argument(help="A run, one of its checkpoints, or a Hugging Face directory.")
    ],
    prompts: Annotated[
        list[str], typer.Option("--prompt", metavar="TEXT", help="What is asked; may be said several times.")
    ],
    images: Annotated[
        list[Path] | None,
        typer.Option(
            "--image",
            metavar="FILE",
            help="Shown with every prompt, where that has <image> or before it; may be said several times.",
        ),
    ] = None,
    videos: Annotated[
        list[Path] | None,
        typer.Option("--video", metavar="FILE", help="The same of a video, where a prompt has <video>."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the likeliest token.")] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Of the likeliest tokens so much mass.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn, above temperature 0.")] = 0,
    as_json: options.JSON = False,
) -> None:
    """Ask a trained model, as its training wrote prompts: by its chat template, or as text that goes on."""
    weights.quiet()
    from bundle.data.prompts import Prompts
    from bundle.models.conversion import to_hugging_face
    from bundle.models.generation import Sampling, answers

    shown = {"image": images or [], "video": videos or []}
    sampling = Sampling(max_tokens, temperature, top_p, seed)
    if files.is_file(model / "config.json"):
        asked = Prompts.of_directory(model)
        given = [asked.prompt(prompt, shown) for prompt in prompts]
        found = list(answers(model, given, asked.ends, sampling))
    else:
        checkpoint, job = weights.checkpoint_of(model, verified=True)
        if job is None:
            raise UsageError(
                f"{model}: no run of ours: `weights export` makes a Hugging Face directory of it"
            )
        asked = Prompts.of_recipe(job)
        given = [asked.prompt(prompt, shown) for prompt in prompts]
        with tempfile.TemporaryDirectory(prefix="generate-") as folder:
            whole = Path(folder, "hf")
            to_hugging_face(checkpoint, Published.of(job), whole, job.model.dtype)
            found = list(answers(whole, given, asked.ends, sampling))
    decode = asked.tokenizer.decode
    texts = [decode(ids[:-1] if ids and ids[-1] in asked.ends else ids) for ids in found]
    for prompt, text, each in zip(prompts, texts, found, strict=True):
        if as_json:
            print(json.dumps({"prompt": prompt, "answer": text, "tokens": len(each)}))
        else:
            print(f"> {prompt}\n{text}" if len(prompts) > 1 else text)
