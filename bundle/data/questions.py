"""Questions of task rl: rows rendered as far as the answer begins, with all their columns for the rewards."""

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from bundle.data import chat
from bundle.data.conversations import Message, build_conversation, read_conversation, read_prompt_messages
from bundle.data.prompts import PromptBuilder
from bundle.data.samples import ORDER_GENERATOR, Blend
from bundle.data.sources import MAX_REASONS, CorruptData, DataErrors, Values, read_rows
from bundle.data.tokenizers import Tokenizer, load_tokenizer
from bundle.errors import UsageError, format_value
from bundle.recipe import Recipe
from bundle.recipe.data import Data
from bundle.recipe.datafiles import DataFile, expand
from bundle.recipe.rl import RL
from bundle.recipe.rl_rules import compute_max_prompt_completion_length
from bundle.recipe.rules import explain_unfit_source
from bundle.rewards.pool import describe_missing_reference

# Rows whose tokens are made at once.
TOKENIZATION_BATCH_ROWS = 256


@dataclass(frozen=True, slots=True)
class Question:
    """One row: `ids` are the rendered question, `number` is its place among all rows of its set.

    `response` are the ids of the row's own answer; none without rl.warm_start_steps.
    """

    number: int
    ids: tuple[int, ...]
    row: Mapping[str, Any]  # all columns, as read
    place: str  # file:line
    response: tuple[int, ...] = ()


@dataclass(frozen=True)
class JoinedQuestions:
    """The questions of some data sets, one set after the other, and what was left out of them."""

    questions: tuple[Question, ...]
    sizes: tuple[int, ...]  # of each data set
    skipped: int  # corrupt rows and files that were passed over
    deleted: int  # rows that are too long (data.truncation: delete)
    left_out: tuple[str, ...]  # a line for each reason

    def __len__(self) -> int:
        return len(self.questions)

    @functools.cached_property
    def digest(self) -> str:
        """The digest of the questions and of the values of their rows; a resumed run must have the same."""
        digest = hashlib.sha256()
        for question in self.questions:
            digest.update(
                repr((question.ids, sorted(question.row.items()))).encode(errors="backslashreplace")
            )
        return digest.hexdigest()


@dataclass(frozen=True)
class Questions:
    """Questions to learn from, in which order, those to evaluate with, and what an answer ends with."""

    training: JoinedQuestions
    evaluation: JoinedQuestions | None
    order: Blend
    stop: tuple[int, ...]  # ids that end an answer, the end of text first
    tokenizer: Tokenizer

    def draw(self, first: int, count: int) -> list[Question]:
        """Return the `count` questions from place `first` of the endless run on."""
        return [self.training.questions[number] for number in self.order.draw_samples(first, count).tolist()]

    @property
    def identity(self) -> dict[str, str]:
        """The digests and names that a resumed run must have too."""
        identity = {
            "questions": self.training.digest,
            "tokenizer": self.tokenizer.identity,
            "order": ORDER_GENERATOR,
        }
        return identity | ({"evaluation questions": self.evaluation.digest} if self.evaluation else {})


def read_rl_prompts(recipe: Recipe) -> Questions:
    """Return the questions of a recipe of task rl.

    Raise UsageError with every file that is missing, every corrupt row (`data.on_error: stop`), every stop
    text that is not one token, and every set without a question.
    """
    assert recipe.rl is not None, "the rules of a recipe require it for task rl"
    data, settings = recipe.data, recipe.rl.evaluation
    encoder = load_tokenizer(data.tokenizer, recipe.architecture.vocab_size)
    reader = _RLTextPromptReader(recipe, recipe.rl, encoder)
    stop = reader.list_answer_end_ids()
    training = reader.read_sets(data, data.training_set_paths, "data.path", is_learned=True)
    evaluation = None
    if settings is not None:
        only = data.model_copy(update={"path": settings.path, "source": settings.source or data.source})
        evaluation = reader.read_sets(only, [settings.path], "rl.evaluation.path", is_learned=False)
    if reader.violations:
        raise UsageError("the questions cannot be used", reader.violations)
    order = Blend(training.sizes, data.weights or (1.0,), recipe.seed)
    return Questions(training, evaluation, order, stop, encoder)


class _RLTextPromptReader:
    """Reads and renders rows; `violations` has all that is wrong with any set."""

    def __init__(self, recipe: Recipe, rl: RL, encoder: Tokenizer) -> None:
        self.violations: list[str] = []
        self._data, self._rl, self._encoder = recipe.data, rl, encoder
        self._writer: Any = chat.build_writer(recipe.data, encoder)
        self._room = compute_max_prompt_completion_length(recipe)

    def list_answer_end_ids(self) -> tuple[int, ...]:
        """Return the ids that end an answer: those of the template, then those of rl.rollout.stop."""
        ends = list(PromptBuilder(self._encoder, self._writer, lambda: None).end_tokens)
        texts = self._rl.rollout.stop
        for text, ids in zip(texts, self._encoder.encode(texts) if texts else (), strict=True):
            if len(ids) != 1:
                self.violations.append(
                    f"rl.rollout.stop: {format_value(text)} is {len(ids)} tokens."
                    " Name texts of one token each."
                )
            ends += ids.tolist()
        return tuple(dict.fromkeys(ends))

    def read_sets(
        self, data: Data, data_sets: Sequence[Sequence[str]], key: str, *, is_learned: bool
    ) -> JoinedQuestions:
        """Return the questions of data sets, whose paths stand under `key`."""
        questions: list[Question] = []
        sizes: list[int] = []
        noted = DataErrors(data.on_error)
        for paths in data_sets:
            errors = DataErrors(data.on_error)
            try:
                sources = expand(paths, data.source, key)
                if reason := explain_unfit_source("rl", sources[0].kind):
                    raise UsageError(f"{key}: {reason}")
                read = [*self._read_prompts_and_responses(sources, errors, is_learned=is_learned)]
                noted.extend(errors.dump())
                errors.summarize_or_raise_by_policy()
                if not read:
                    names = ", ".join(paths)[:200]
                    raise UsageError(f"{key}: {names}: no question is left. Name rows with questions.")
            except UsageError as error:
                self.violations += error.violations or [str(error)]
                continue
            questions += [
                Question(len(questions) + number, ids, row, place, response)
                for number, (place, row, ids, response) in enumerate(read)
            ]
            sizes.append(len(read))
        lines = (*noted.corrupt.format_lines(), *noted.deleted.format_lines())[:MAX_REASONS]
        return JoinedQuestions(
            tuple(questions), tuple(sizes), noted.corrupt.count, noted.deleted.count, lines
        )

    def _read_prompts_and_responses(
        self, sources: Iterable[DataFile], errors: DataErrors, *, is_learned: bool
    ) -> Iterator[tuple[str, Values, tuple[int, ...], tuple[int, ...]]]:
        """Yield place, row, ids and response of each question; `errors` note the other rows."""
        read = read_rows([*sources], None, errors)
        drafted = errors.convert_rows(
            read, lambda row: (row, self._draft_question_and_answer(row, is_learned=is_learned))
        )
        while batch := [*islice(drafted, TOKENIZATION_BATCH_ROWS)]:
            documents = iter(self._writer.encode([draft for _, (_, drafts) in batch for draft in drafts]))
            for place, (row, drafts) in batch:
                ids, *responses = [next(documents) for _ in drafts]
                question = tuple(ids.ids.tolist())
                response = tuple(responses[0].ids[responses[0].loss_mask].tolist()) if responses else ()
                if self._has_room_for_answer(place, question, response, errors):
                    yield place, row, question, response

    def _draft_question_and_answer(self, row: Values, *, is_learned: bool) -> list[Any]:
        """Return the question of a row as a draft, and the draft of its answer where a warm start learns it.

        Raise CorruptData for a row that is not a question.
        """
        messages = read_prompt_messages(row, self._data.fields.prompt)
        answer: Message = {"role": "assistant", "content": "."}
        # With an answer it is a conversation, which has the row's system message, tools and images.
        conversation = build_conversation([*messages, answer], row, self._data, len(messages))
        if conversation.tools:
            raise CorruptData(
                f"field {self._data.fields.tools}: tools are not rendered in questions. Leave them out"
            )
        if conversation.media:
            raise CorruptData(f"the row has {conversation.media[0].kind}s, but questions must be text")
        if reason := describe_missing_reference(self._rl.rewards, row, self._data.fields.response):
            raise CorruptData(reason)
        question = self._writer.write_prompt(conversation.messages[:-1])
        if not (is_learned and self._rl.warm_start_steps):
            return [question]
        try:
            answered = read_conversation(row, self._data)
        except CorruptData as error:
            raise CorruptData(
                f"rl.warm_start_steps: trains on the row's answer, which cannot be read: {error}"
            ) from error
        answered = replace(answered, learned_turns=[len(answered.messages) - 1])
        (drafts,) = self._writer.draft([self._writer.prepare_render_request(answered)])
        if isinstance(drafts, CorruptData):
            raise drafts
        return [question, drafts[-1][0]]

    def _has_room_for_answer(
        self, place: str, ids: tuple[int, ...], response: tuple[int, ...], errors: DataErrors
    ) -> bool:
        """Return whether the longest answer has room behind a question; `errors` note where it has not."""
        longest = max(self._rl.rollout.max_completion_length, len(response))
        if not ids:
            errors.record_corrupt_data(place, "the question has no tokens")
        elif len(ids) + longest > self._room:
            reason = (
                f"rl.rollout.max_completion_length: {longest} tokens of answer plus {len(ids)} tokens of"
                f" question exceed the {self._room} tokens that data.sequence_length and the model's"
                " positions allow"
            )
            (errors.deleted if self._data.truncation == "delete" else errors.corrupt).add(place, reason)
        else:
            return True
        return False
