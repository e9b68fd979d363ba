"""`mcore-bundle generate`: what a trained model answers."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bundle.cli import options, weights
from bundle.errors import UsageError, shown
from bundle.pretrained.writing import Published
from bundle.recipe import Recipe

if TYPE_CHECKING:
    from bundle.data.chat import ChatTemplate, Headings
    from bundle.data.tokenizers import Tokenizer

    Writer = Callable[[str], list[int]]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def generate(
    model: Annotated[
        Path, typer.Argument(help="A run, one of its checkpoints, or a Hugging Face directory.")
    ],
    prompts: Annotated[
        list[str], typer.Option("--prompt", metavar="TEXT", help="What is asked; may be said several times.")
    ],
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the likeliest token.")] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Of the likeliest tokens so much mass.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn, above temperature 0.")] = 0,
    as_json: options.JSON = False,
) -> None:
    """Ask a trained model, as its training wrote prompts: by its chat template, or as text that goes on."""
    weights.quiet()
    from bundle.models.conversion import to_hugging_face
    from bundle.models.generation import Sampling, answers

    sampling = Sampling(max_tokens, temperature, top_p, seed)
    if (model / "config.json").is_file():
        made, write = _of_directory(model)
        found = list(answers(model, map(write, prompts), made.end_of_text, sampling))
    else:
        checkpoint, job = weights.checkpoint_of(model, verified=True)
        if job is None:
            raise UsageError(
                f"{model}: no run of ours: `weights export` makes a Hugging Face directory of it"
            )
        made, write = _of_recipe(job)
        ids = [write(prompt) for prompt in prompts]
        with tempfile.TemporaryDirectory(prefix="generate-") as folder:
            whole = Path(folder, "hf")
            to_hugging_face(checkpoint, Published.of(job), whole, job.model.dtype)
            found = list(answers(whole, ids, made.end_of_text, sampling))
    texts = [made.decode(ids[:-1] if ids[-1:] == [made.end_of_text] else ids) for ids in found]
    for prompt, text, each in zip(prompts, texts, found, strict=True):
        if as_json:
            print(json.dumps({"prompt": prompt, "answer": text, "tokens": len(each)}))
        else:
            print(f"> {prompt}\n{text}" if len(prompts) > 1 else text)


def _of_recipe(job: Recipe) -> tuple["Tokenizer", "Writer"]:
    """A job's tokenizer, and what writes a prompt as the rows that the job was trained with are written."""
    from bundle.data import chat
    from bundle.data.tokenizers import tokenizer

    made = tokenizer(job.data.tokenizer, job.architecture.vocab_size)
    if job.task == "pretrain":
        return made, lambda prompt: made.encode([prompt])[0].tolist()
    return made, _asking(chat.writer(job.data, made))


def _of_directory(directory: Path) -> tuple["Tokenizer", "Writer"]:
    """The tokenizer of a directory, and what writes a prompt by its chat template, where it has one."""
    from bundle.data.chat import ChatTemplate
    from bundle.data.tokenizers import HuggingFace

    made = HuggingFace(directory)
    if not made.has_chat_template:
        return made, lambda prompt: made.encode([prompt])[0].tolist()
    return made, _asking(ChatTemplate(made))


def _asking(writer: "Headings | ChatTemplate") -> "Writer":
    from bundle.data.sources import Corrupt

    def ask(prompt: str) -> list[int]:
        try:
            ids: list[int] = writer.prompt([{"role": "user", "content": prompt}]).tolist()
        except Corrupt as error:
            raise UsageError(f"--prompt {shown(prompt)}: {error}") from error
        return ids

    return ask
