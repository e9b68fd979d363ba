"""What a trained model is asked, written as the rows of its training were."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from bundle.data import chat, media
from bundle.data.chat import ChatTemplate, Headings
from bundle.data.conversations import Conversation
from bundle.data.corpus import learned_ends
from bundle.data.media import MARKS, Column
from bundle.data.processing import Processing
from bundle.data.sources import Corrupt
from bundle.data.tokenization import seen, with_room
from bundle.data.tokenizers import HuggingFace, Tokenizer, tokenizer
from bundle.errors import UsageError, shown
from bundle.models.generation import Prompt, Shown
from bundle.recipe import Recipe


@dataclass(frozen=True)
class Prompts:
    """A tokenizer, and how what is asked is written; without a writer it is a text that goes on."""

    tokenizer: Tokenizer
    _writer: "Headings | ChatTemplate | None"
    _processing: Callable[[], Processing | None]
    _begins: tuple[int, ...] = ()  # of a text that goes on

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """What an answer ends with: the tokenizer's end of text, then what the writer has behind a turn."""
        end = self.tokenizer.end_of_text
        if (write := cast(Any, self._writer)) is None:
            return (end,)
        says = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "."}]
        (drafts,) = write.draft([write.prepare(Conversation(says, [1]))])
        if isinstance(drafts, Corrupt):
            raise UsageError(f"data.template: {drafts}")
        (document,) = write.encode([draft for draft, _ in drafts])
        learned = np.ones(len(document.ids), np.bool_) if document.learned is None else document.learned
        return (end, *sorted(learned_ends(document.ids, learned, self.tokenizer) - {end}))

    @classmethod
    def of_recipe(cls, job: Recipe) -> "Prompts":
        """Those of a job's rows."""
        made = tokenizer(job.data.tokenizer, job.architecture.vocab_size)
        writer = None if job.task == "pretrain" else chat.writer(job.data, made)
        return cls(made, writer, lambda: Processing.of(job))

    @classmethod
    def of_directory(cls, directory: Path) -> "Prompts":
        """Those of a Hugging Face directory, by its chat template, where it has one."""
        made = HuggingFace(directory)
        writer = ChatTemplate(made, date.today().isoformat()) if made.has_chat_template else None
        return cls(made, writer, lambda: Processing.of_directory(directory), made.begins)

    def prompt(self, text: str, named: Mapping[str, Sequence[Path]]) -> Prompt:
        """What is asked with the images and videos of these files, by kind.

        They stand where the text has their mark (<image>, <video>), or before it. Raises UsageError for what
        cannot be asked.
        """
        try:
            return self._prompt(text, {kind: paths for kind, paths in named.items() if paths})
        except Corrupt as error:
            raise UsageError(f"--prompt {shown(text)}: {error}") from error

    def _prompt(self, text: str, named: Mapping[str, Sequence[Path]]) -> Prompt:
        if self._writer is None:
            if named:
                raise Corrupt("without a chat template it is shown nothing")
            return Prompt([*self._begins, *self.tokenizer.encode([text])[0].tolist()])
        for mark, kind in reversed(MARKS.items()):
            text = text if mark in text else mark * len(named.get(kind, ())) + text
        messages = [{"role": "user", "content": text}]
        columns = {
            kind: Column(f"--{kind}", [str(path.resolve()) for path in paths])
            for kind, paths in named.items()
        }
        found = media.placed(messages, columns)
        processing = self._processing() if found else None
        draft, pictures = seen(processing, self.tokenizer, self._writer.prompt(messages), found, Path("/"))
        (document,) = self._writer.encode([draft])
        if processing is None or not pictures:
            return Prompt(document.ids.tolist())
        document = with_room(document, pictures, processing.vision)
        patches = np.concatenate([processing.patches(picture) for picture in pictures])
        grids = torch.tensor([picture.grid for picture in pictures])
        seconds = torch.tensor([picture.seconds for picture in pictures])
        return Prompt(document.ids.tolist(), Shown(torch.from_numpy(patches), grids, seconds))
