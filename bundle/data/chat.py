"""SFT rows to token ids and their loss mask: by plain headings or a chat template."""

import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NoReturn

import numpy as np
from jinja2 import TemplateSyntaxError  # torch needs it, too
from numpy.typing import NDArray

from bundle.data.tokenizers import HuggingFace, Tokenizer, Tokens
from bundle.errors import UsageError, shown
from bundle.recipe.sections import Data, Fields

Message = dict[str, Any]
Part = tuple[int, int]  # characters of a text, from and to
Parts = list[Part]
Learned = NDArray[np.bool_]
# The ids of each conversation and which of them are learned, or what is wrong with it.
Writer = Callable[[Sequence[list[Message]]], list[tuple[Tokens, Learned] | str]]
ROLES = ("system", "user", "assistant", "tool")

# A conversation takes a millisecond. Loops within loops pass the sandbox's limit of each.
RENDERING_SECONDS = 20  # of this process's own computing: a busy machine does not count
# Unicode says that these are in no text.
BEGIN, END = "\ufdd0", "\ufdd1"
THOUGHT = "</think>"
GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


def messages_of(values: Mapping[str, Any], fields: Fields) -> list[Message] | str:
    """The conversation of a row (its messages, else its prompt and response), or what is wrong with it.

    A field that is null counts as missing where the row has the others: tables have every column in each row.
    """
    others = fields.prompt in values or fields.response in values
    if values.get(fields.messages) is not None or (fields.messages in values and not others):
        return _checked(values[fields.messages], fields.messages)
    for name in (fields.prompt, fields.response):
        text = values.get(name)
        if name not in values:
            return f"field {name}: missing; the row has {', '.join(map(str, values)) or 'no fields'}"
        if not isinstance(text, str) or not text.strip():
            return f"field {name}: must be text, is {shown(text)}"
    return [
        {"role": "user", "content": values[fields.prompt]},
        {"role": "assistant", "content": values[fields.response]},
    ]


def _checked(messages: Any, field: str) -> list[Message] | str:
    if not isinstance(messages, list) or not messages:
        return f"field {field}: must be a list of messages, is {shown(messages)}"
    for index, message in enumerate(messages):
        where = f"field {field}[{index}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            return f"{where}: must be an object with a role of {', '.join(ROLES)}, is {shown(message)}"
        if not isinstance(message.get("content"), str):
            return f"{where}: content must be text, is {shown(message.get('content'))}"
    if messages[-1]["role"] != "assistant" or not messages[-1]["content"].strip():
        return f"field {field}: must end with what the assistant says"
    return [{key: value for key, value in one.items() if value is not None} for one in messages]


class ChatTemplate:
    """A tokenizer's chat template. What a template raises about a conversation becomes that row's problem."""

    def __init__(self, tokenizer: HuggingFace, learn: str) -> None:
        """`learn` is the recipe's data.learn. Raises UsageError where there is no template."""
        self._tokenizer, self._last_only = tokenizer, learn == "last_turn"
        self._template = tokenizer.chat_template()
        # transformers gives masks of tokens for these; characters serve all templates alike.
        self._marked, count = GENERATION.subn(_mark, self._template)
        self._marks_turns = count > 0

    def write(self, messages: Sequence[Message]) -> tuple[str, Parts] | str:
        """The conversation and what is learned of it, or why the assistant's words cannot be told in it.

        Where the template marks what the assistant says ({% generation %}), that is learned; elsewhere a turn
        is what the conversation up to it adds to the prompt before it. Raises UsageError for a template that
        is none, or comes to no end.
        """
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        turns = turns[-1:] if self._last_only else turns
        try:
            written = self._write_marked(messages) if self._marks_turns else self._write(messages, turns)
        except UsageError:
            raise
        except TemplateSyntaxError as error:
            where = f"{self._tokenizer.directory} cannot be read: {error.message}, line {error.lineno}"
            raise UsageError(f"data.template: the chat template of {where}") from error
        except Exception as error:  # noqa: BLE001  a template raises what it likes about a row
            return f"the chat template refuses it: {error}"
        if isinstance(written, str):
            return written
        return _left_out([messages[index]["content"] for index in turns], *written) or written

    def _write(self, messages: Sequence[Message], turns: Sequence[int]) -> tuple[str, Parts] | str:
        text, parts = self._render(messages, prompt=False), []
        for index in turns:
            turn = self._turn(messages, index, text)
            if isinstance(turn, str):
                return turn
            parts.append(turn)
        return text, parts

    def _write_marked(self, messages: Sequence[Message]) -> tuple[str, Parts] | str:
        if any(mark in message["content"] for message in messages for mark in (BEGIN, END)):
            return "holds U+FDD0 or U+FDD1, which are no characters"
        text, parts = _unmarked(self._render(messages, prompt=False, template=self._marked))
        if not self._last_only:
            return text, parts
        turn = self._turn(messages, len(messages) - 1, text)
        if isinstance(turn, str):
            return turn
        return text, [(max(start, turn[0]), until) for start, until in parts if until > turn[0]]

    def _turn(self, messages: Sequence[Message], index: int, text: str) -> Part | str:
        """Where message `index` stands in `text`, the whole conversation, or why that cannot be told."""
        if index == 0:
            return "message 0: a chat template needs something before what the assistant says"
        earlier = messages[:index]
        until = text if index == len(messages) - 1 else self._render(messages[: index + 1], prompt=False)
        if not text.startswith(until):
            return (
                f"message {index}: the chat template writes it differently when the conversation goes on;"
                " data.learn: last_turn learns only the last one"
            )
        start = self._render(earlier, prompt=True)
        if not until.startswith(start):
            # The prompt opens what the turn is written without, such as thoughts: learned is the turn from
            # where any answer begins.
            other = self._render([*earlier, {**messages[index], "content": END}], prompt=False)
            start = _shared(start, other)
            begins = other[len(start) : other.find(END)]
            if not (until.startswith(start) and (not begins or begins.strip().endswith(THOUGHT))):
                return f"message {index}: the chat template's prompt for it is not what it is written after"
        return len(start), len(until)

    def _render(self, messages: Sequence[Message], *, prompt: bool, template: str = "") -> str:
        with _limited(lambda: self._refuse(messages)):
            return self._tokenizer.render(messages, template or self._template, prompt=prompt)

    def _refuse(self, messages: Sequence[Message]) -> NoReturn:
        begins = repr(messages[0]["content"])[:60]
        raise UsageError(
            f"data.template: the chat template of {self._tokenizer.directory} came to no end in"
            f" {RENDERING_SECONDS} s of computing, on the conversation that begins {begins}; mend it, or use"
            " data.template: plain"
        )


def _shared(one: str, other: str) -> str:
    """What both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((place for place, (a, b) in pairs if a != b), len(one))]


def _left_out(contents: Sequence[str], text: str, parts: Parts) -> str | None:
    """What the assistant says and nobody would learn, or None; a template may strip white space."""
    learned = [text[start:until] for start, until in parts]
    for content in contents:
        *thoughts, answer = content.split(THOUGHT)
        if not any(answer.strip() in part for part in learned):
            return f"the chat template does not write what the assistant says: {answer.strip()[:40]!r}"
        if thoughts and not any(THOUGHT in part for part in learned):
            return f"the chat template leaves out the assistant's thoughts (up to {THOUGHT})"
    return None


def _mark(tag: re.Match[str]) -> str:
    """The tag's place as a character; written as a block, so that white space around it goes as before."""
    before, end, after = tag.groups()
    return f"{{%{before} if true %}}{END if end else BEGIN}{{% endif {after}%}}"


def _unmarked(text: str) -> tuple[str, Parts]:
    """The text without marks, and the parts between them."""
    pieces = re.split(f"[{BEGIN}{END}]", text)  # every other piece stood between two marks
    places = [0]
    for piece in pieces:
        places.append(places[-1] + len(piece))
    parts = list(zip(places[1::2], places[2::2], strict=False))
    return "".join(pieces), [(start, end) for start, end in parts if start < end]


@contextmanager
def _limited(refuse: Callable[[], NoReturn]) -> Iterator[None]:
    """Calls `refuse`, which raises, where the body computes too long; only a main thread can be limited."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, lambda *_: refuse())
    signal.setitimer(signal.ITIMER_VIRTUAL, RENDERING_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def writer(data: Data, tokenizer: Tokenizer) -> Writer:
    """What makes tokens of conversations as `data.template` says; many at once, for a tokenizer's threads.

    Raises UsageError where the tokenizer has no chat template that can be used.
    """
    if data.template == "plain":
        return lambda conversations: _plain(conversations, tokenizer, data.learn)
    if not isinstance(tokenizer, HuggingFace):
        raise UsageError(f"data.template: {data.tokenizer} has no chat template; use data.template: plain")
    template = ChatTemplate(tokenizer, data.learn)
    return lambda conversations: _templated(conversations, tokenizer, template)


def _plain(
    conversations: Sequence[list[Message]], tokenizer: Tokenizer, learn: str
) -> list[tuple[Tokens, Learned] | str]:
    """Under headings like "### User", the end of text after each turn of the assistant."""
    headed = (
        text
        for messages in conversations
        for message in messages
        for text in (f"### {message['role'].capitalize()}\n", f"{message['content']}\n")
    )
    encoded = iter(tokenizer.encode(list(headed)))
    end = np.asarray([tokenizer.end_of_text], np.uint32)
    written: list[tuple[Tokens, Learned] | str] = []
    for messages in conversations:
        parts, learned = [], []
        for index, message in enumerate(messages):
            heading, said = islice(encoded, 2)
            answers = message["role"] == "assistant"
            parts += [heading, np.concatenate([said, end]) if answers else said]
            learned += [False, answers and (learn == "all_turns" or index == len(messages) - 1)]
        written.append((np.concatenate(parts), np.repeat(learned, [len(part) for part in parts])))
    return written


def _templated(
    conversations: Sequence[list[Message]], tokenizer: HuggingFace, template: ChatTemplate
) -> list[tuple[Tokens, Learned] | str]:
    """By the chat template: a token is learned when it begins in a part that is."""
    drafts = [template.write(messages) for messages in conversations]
    encoded = iter(tokenizer.encode_placed([draft[0] for draft in drafts if not isinstance(draft, str)]))

    def finished() -> Iterator[tuple[Tokens, Learned] | str]:
        for draft in drafts:
            if isinstance(draft, str):
                yield draft
                continue
            ids, places = next(encoded)
            learned = np.zeros(len(ids), np.bool_)
            for start, until in draft[1]:
                learned |= (places >= start) & (places < until)
            yield ids, learned

    return list(finished())
