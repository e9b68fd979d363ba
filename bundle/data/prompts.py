"""Write prompts for a trained model in the format of its training rows."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from bundle.data import chat, media
from bundle.data.chat import ChatTemplate, PlainTemplate
from bundle.data.conversations import Conversation
from bundle.data.corpus import find_end_tokens
from bundle.data.media import MEDIA_KIND_BY_PLACEHOLDER, RowColumn
from bundle.data.processing import MediaProcessor
from bundle.data.sources import CorruptData
from bundle.data.tokenization import expand_media_tokens, read_media_and_insert_times
from bundle.data.tokenizers import HuggingFaceTokenizer, Tokenizer, load_tokenizer
from bundle.errors import UsageError, format_value
from bundle.packing.prompts import Prompt, VisualInputs
from bundle.recipe import Recipe


@dataclass(frozen=True)
class PromptBuilder:
    """A tokenizer and a writer of prompts; without a writer a prompt is a text that the model continues."""

    tokenizer: Tokenizer
    _writer: "PlainTemplate | ChatTemplate | None"
    _load_processor: Callable[[], MediaProcessor | None]
    _prefix_ids: tuple[int, ...] = ()  # of a text that goes on

    @functools.cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """The ids that end an answer: the end of text, then those that the writer puts behind a turn."""
        end = self.tokenizer.end_of_text
        if (writer := cast(Any, self._writer)) is None:
            return (end,)
        says = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "."}]
        (drafts,) = writer.draft([writer.prepare_render_request(Conversation(says, [1]))])
        if isinstance(drafts, CorruptData):
            raise UsageError(f"data.template: {drafts}")
        (document,) = writer.encode([draft for draft, _ in drafts])
        learned = np.ones(len(document.ids), np.bool_) if document.loss_mask is None else document.loss_mask
        return (end, *sorted(find_end_tokens(document.ids, learned, self.tokenizer) - {end}))

    @classmethod
    def from_recipe(cls, job: Recipe) -> "PromptBuilder":
        """Return the prompts in the format of a job's rows."""
        text_tokenizer = load_tokenizer(job.data.tokenizer, job.architecture.vocab_size)
        writer = None if job.task_traits.has_plain_text_rows else chat.build_writer(job.data, text_tokenizer)
        return cls(text_tokenizer, writer, lambda: MediaProcessor.from_recipe(job))

    @classmethod
    def from_directory(cls, directory: Path) -> "PromptBuilder":
        """Return the prompts of a Hugging Face directory, written by its chat template where it has one."""
        text_tokenizer = HuggingFaceTokenizer(directory)
        writer = (
            ChatTemplate(text_tokenizer, date.today().isoformat())
            if text_tokenizer.has_chat_template
            else None
        )
        return cls(
            text_tokenizer,
            writer,
            lambda: MediaProcessor.from_directory(directory),
            text_tokenizer.prefix_ids,
        )

    def build_prompt(self, text: str, media_paths: Mapping[str, Sequence[Path]]) -> Prompt:
        """Return a text as a prompt with the images and videos of these files, by kind.

        They stand at their marks (<image>, <video>) in the text, or before it. Raise UsageError for a prompt
        that cannot be written.
        """
        try:
            return self._build_prompt(text, {kind: paths for kind, paths in media_paths.items() if paths})
        except CorruptData as error:
            raise UsageError(f"--prompt {format_value(text)}: {error}") from error

    def _build_prompt(self, text: str, media_paths: Mapping[str, Sequence[Path]]) -> Prompt:
        if self._writer is None:
            if media_paths:
                raise CorruptData("images and videos need a chat template, and the model has none")
            return Prompt([*self._prefix_ids, *self.tokenizer.encode([text])[0].tolist()])
        for mark, kind in reversed(MEDIA_KIND_BY_PLACEHOLDER.items()):
            text = text if mark in text else mark * len(media_paths.get(kind, ())) + text
        messages = [{"role": "user", "content": text}]
        columns = {
            kind: RowColumn(f"--{kind}", [str(path.resolve()) for path in paths])
            for kind, paths in media_paths.items()
        }
        prompt_media = media.pop_media(messages, columns)
        processor = self._load_processor() if prompt_media else None
        draft, pictures = read_media_and_insert_times(
            processor, self.tokenizer, self._writer.write_prompt(messages), prompt_media, Path("/")
        )
        (document,) = self._writer.encode([draft])
        if processor is None or not pictures:
            return Prompt(document.ids.tolist())
        document = expand_media_tokens(document, pictures, processor.vision)
        patches = np.concatenate([processor.extract_patches(picture) for picture in pictures])
        grids = torch.tensor([picture.grid for picture in pictures])
        seconds = torch.tensor([picture.seconds for picture in pictures])
        return Prompt(document.ids.tolist(), VisualInputs(torch.from_numpy(patches), grids, seconds))
