"""`mcore-bundle generate`: the answers of a trained model."""

import json
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bundle import files
from bundle.architectures import read_config
from bundle.cli import options, weights
from bundle.errors import UsageError
from bundle.pretrained.writing import PublishedModel
from bundle.recipe import Recipe

if TYPE_CHECKING:
    from bundle.mcore.torch_dist import TorchDistCheckpoint
    from bundle.packing.prompts import Prompt

DEFAULT_MAX_TOKENS = 128

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def generate(
    model: Annotated[
        Path, typer.Argument(help="A run, one of its checkpoints, or a Hugging Face directory.")
    ],
    prompts: Annotated[
        list[str],
        typer.Option("--prompt", metavar="TEXT", help="Answer this prompt; may be given several times."),
    ],
    images: Annotated[
        list[Path] | None,
        typer.Option(
            "--image",
            metavar="FILE",
            help="Show this image at <image> in each prompt, or before it; may be given several times.",
        ),
    ] = None,
    videos: Annotated[
        list[Path] | None,
        typer.Option("--video", metavar="FILE", help="Show this video at <video>, or before the prompt."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Stop an answer after this number of tokens. Default: 128, or the positions left."
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Set the temperature; 0 is greedy.")] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Nucleus sampling: total probability.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Set the seed of sampling.")] = 0,
    as_json: options.JSON_OPTION = False,
) -> None:
    """Generate answers: with the chat template of the training, or as text that is continued."""
    weights.refuse_missing_directory(model)
    weights.silence_megatron_warnings()
    from bundle.data.prompts import PromptBuilder
    from bundle.models.generation import GenerationOptions, generate_answers

    checkpoint, job = None, None
    if not files.is_file(model / "config.json"):
        checkpoint, job = weights.find_checkpoint(model, verified=True)
        if job is None:
            raise UsageError(
                f"{model}: not a run of mcore-bundle. Make a Hugging Face directory with `weights export`"
            )
    writer = PromptBuilder.from_recipe(job) if job else PromptBuilder.from_directory(model)
    media = {"image": images or [], "video": videos or []}
    encoded = [writer.build_prompt(prompt, media) for prompt in prompts]
    positions = job.architecture.max_position_embeddings if job else _read_max_position_embeddings(model)
    sampling = GenerationOptions(
        compute_max_answer_tokens(max_tokens, encoded, positions), temperature, top_p, seed
    )
    text = AnswerPrinter(writer.tokenizer.decode, writer.end_tokens, as_json=as_json)
    with open_hugging_face_directory(model, checkpoint, job) as directory:
        answer_ids = generate_answers(directory, encoded, writer.end_tokens, sampling, text.add)
        for prompt in prompts:
            text.begin(prompt if len(prompts) > 1 else None)
            text.close(prompt, next(answer_ids))


class AnswerPrinter:
    """Prints an answer while its tokens come, or as one JSON object when it is complete."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], end_ids: Collection[int], *, as_json: bool
    ) -> None:
        self._decode, self._end_ids, self._as_json = decode, end_ids, as_json
        self._ids: list[int] = []
        self._text_start = self._printed = 0  # tokens: the beginning of the last text, and the number printed

    def begin(self, prompt: str | None) -> None:
        """Begin an answer, after a line with its prompt where there is one."""
        self._ids, self._text_start, self._printed = [], 0, 0
        if prompt is not None and not self._as_json:
            print(f"> {prompt}", flush=True)

    def add(self, token: int) -> None:
        """Print the text of a token, unless it ends the answer or its last character is incomplete."""
        if token not in self._end_ids and not self._as_json:
            self._ids.append(token)
            self._print_complete_characters(is_last=False)

    def close(self, prompt: str, ids: Sequence[int]) -> None:
        """Print the rest of an answer with these tokens."""
        if self._as_json:
            answer = self._decode(ids[:-1] if ids and ids[-1] in self._end_ids else ids)
            print(json.dumps({"prompt": prompt, "answer": answer, "tokens": len(ids)}), flush=True)
            return
        self._print_complete_characters(is_last=True)
        print(flush=True)

    def _print_complete_characters(self, *, is_last: bool) -> None:
        # A token's text depends on the one before it: a tokenizer drops a space at the beginning.
        old = self._decode(self._ids[self._text_start : self._printed])
        new = self._decode(self._ids[self._text_start :])
        if is_last or not new.endswith("\N{REPLACEMENT CHARACTER}"):
            print(new[len(old) :], end="", flush=True)
            self._text_start, self._printed = self._printed, len(self._ids)


def _read_max_position_embeddings(directory: Path) -> int | None:
    """Return the number of positions in the config of a directory; None where it has none."""
    config: Any = read_config(directory)
    text = config.get("text_config")
    positions = {**config, **(text if isinstance(text, dict) else {})}.get("max_position_embeddings")
    return positions if type(positions) is int else None


def compute_max_answer_tokens(
    max_tokens: int | None, prompts: Sequence["Prompt"], positions: int | None
) -> int:
    """Return the most tokens of an answer. Raise UsageError for more than the positions allow."""
    longest = max(len(prompt.ids) for prompt in prompts)
    if positions is None:
        return max_tokens or DEFAULT_MAX_TOKENS
    if (free_positions := positions - longest) < 1:
        raise UsageError(
            f"--prompt: the longest has {longest:,} tokens, and the model {positions:,} positions"
            f" (max_position_embeddings). Shorten it to {positions - 1:,} tokens at most."
        )
    if max_tokens is not None and max_tokens > free_positions:
        raise UsageError(
            f"--max-tokens: {max_tokens:,} is more than the model's {positions:,} positions"
            f" (max_position_embeddings) hold behind a prompt of {longest:,} tokens. Set it to"
            f" {free_positions:,}."
        )
    return max_tokens or min(DEFAULT_MAX_TOKENS, free_positions)


@contextmanager
def open_hugging_face_directory(
    model: Path, checkpoint: "TorchDistCheckpoint | None", job: Recipe | None
) -> Iterator[Path]:
    """Yield a Hugging Face directory of the model; for a checkpoint, one that is removed at the end."""
    if checkpoint is None or job is None:
        yield model
        return
    from bundle.checkpoints import manifest, state
    from bundle.models.conversion import write_full_hugging_face_model
    from bundle.models.merging import find_base

    if base := find_base(job):
        step = checkpoint.root.parent
        digests = {path.name: manifest.compute_digest(path) for path in base.weights.files}
        try:
            saved = state.read(step)
        except ValueError as error:
            raise UsageError(f"{step}: {error}") from error
        state.refuse_other_weights(step, saved, digests)
    with tempfile.TemporaryDirectory(prefix="generate-") as folder:
        exported = Path(folder, "hf")
        write_full_hugging_face_model(
            checkpoint, PublishedModel.from_recipe(job), exported, job.model.dtype, base
        )
        yield exported
