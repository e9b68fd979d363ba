"""Conversations as token ids and their loss mask, by plain headings or a chat template."""

import functools
import json
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from itertools import accumulate, takewhile
from typing import NoReturn

import numpy as np
from jinja2 import TemplateError, TemplateSyntaxError  # torch needs it, too

from bundle.data.conversations import Conversation, Message, Tools, texts
from bundle.data.sources import Corrupt
from bundle.data.store import Document
from bundle.data.tokenizers import HuggingFace, Tokenizer
from bundle.errors import UsageError
from bundle.recipe.data import Data

Part = tuple[int, int]  # characters of a text, from and to

# A conversation takes a millisecond. Loops within loops pass the sandbox's limit of each.
RENDERING_SECONDS = 20  # of this process's own computing: a busy machine does not count
# Unicode says that these are in no text.
BEGIN, END = "\ufdd0", "\ufdd1"
THOUGHT = "</think>"
# Where a template asks the clock that transformers gives it.
CLOCK = re.compile(r"""strftime_now\(\s*(['"])([^'"\\]*)\1\s*\)""")
GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


def writer(data: Data, tokenizer: Tokenizer) -> "Headings | ChatTemplate":
    """What writes conversations as `data.template` says: each a draft, then many at once, for its threads.

    Raises UsageError for a tokenizer without a usable chat template.
    """
    if data.template == "plain":
        return Headings(tokenizer)
    if not isinstance(tokenizer, HuggingFace):
        raise UsageError(f"data.template: {data.tokenizer} has no chat template; use data.template: plain")
    return ChatTemplate(tokenizer, date.fromisoformat(data.date) if data.date else None)


class Headings:
    """Plain headings like "### User", and the end of text after each turn of the assistant."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._end = tokenizer, np.uint32(tokenizer.end_of_text)

    def draft(self, conversation: Conversation) -> list[tuple[str, bool, bool]]:
        """Pieces of text: whether the end of text follows each, and whether it is learned."""
        if conversation.tools or any("tool_calls" in message for message in conversation.messages):
            raise Corrupt("data.template: plain does not write tools and their calls; use chat")
        if conversation.media:
            raise Corrupt("data.template: plain does not write images and videos; use chat")
        pieces = []
        for index, message in enumerate(conversation.messages):
            pieces.append((_heading(message["role"]), False, False))
            answers, learned = message["role"] == "assistant", index in conversation.turns
            pieces.append((f"{message['content']}\n", answers, learned))
        return pieces

    def prompt(self, messages: list[Message]) -> list[tuple[str, bool, bool]]:
        """What the assistant speaks after, as a draft of which nothing is learned."""
        return [*self.draft(Conversation(messages, ())), (_heading("assistant"), False, False)]

    def encode(self, drafts: Sequence[list[tuple[str, bool, bool]]]) -> Iterator[Document]:
        """The tokens of each draft."""
        encoded = iter(self._tokenizer.encode([text for pieces in drafts for text, _, _ in pieces]))
        for pieces in drafts:
            parts = [np.append(next(encoded), self._end) if ends else next(encoded) for _, ends, _ in pieces]
            learned = np.repeat([learned for _, _, learned in pieces], [len(part) for part in parts])
            yield Document(np.concatenate(parts), learned)


def _heading(role: str) -> str:
    return f"### {role.capitalize()}\n"


class ChatTemplate:
    """A tokenizer's chat template. What a template raises about a conversation becomes that row's problem."""

    def __init__(self, tokenizer: HuggingFace, today: date | None = None) -> None:
        """`today` is the date that it writes where it asks for it.

        Raises UsageError where there is no template, or no date for one that asks.
        """
        self._tokenizer, self._template = tokenizer, tokenizer.chat_template()
        if today is not None:
            self._template = CLOCK.sub(lambda asked: repr(today.strftime(asked[2])), self._template)
        if "strftime_now(" in self._template:
            raise UsageError(
                f"data.template: the chat template of {tokenizer.directory} writes today's date"
                " (strftime_now), by which tokens would change from day to day: say which one it is to write,"
                " data.date: YYYY-MM-DD"
            )
        # transformers gives masks of tokens for these; characters serve all templates alike.
        self._marked, self._marks = GENERATION.subn(_mark, self._template)

    def draft(self, conversation: Conversation) -> tuple[str, list[Part]]:
        """The text, and its learned parts. Corrupt where the assistant's words cannot be told in it.

        Where the template marks what the assistant says ({% generation %}), that is learned; elsewhere a turn
        is what the conversation up to it adds to the prompt before it. Raises UsageError for a template that
        is none, or comes to no end.
        """
        if conversation.tools and "tools" not in self._template:
            raise Corrupt("the chat template does not write the tools that the row has")
        with self._understood():
            text, parts = self._written(conversation)
        learned = [text[start:until] for start, until in parts]
        for index in conversation.turns:
            _refuse_left_out(conversation.messages[index], learned)
        return text, parts

    def prompt(self, messages: list[Message]) -> tuple[str, list[Part]]:
        """What the assistant speaks after, as a draft of which nothing is learned.

        Raises Corrupt where the template refuses.
        """
        with self._understood():
            return self._render(messages, None, prompt=True), []

    def encode(self, drafts: Sequence[tuple[str, list[Part]]]) -> Iterator[Document]:
        """The tokens of each draft: one is learned when it begins in a part that is."""
        encoded = self._tokenizer.encode_placed([text for text, _ in drafts])
        for (ids, places), (_, parts) in zip(encoded, drafts, strict=True):
            learned = np.zeros(len(ids), np.bool_)
            for start, until in parts:
                learned |= (places >= start) & (places < until)
            yield Document(ids, learned)

    @contextmanager
    def _understood(self) -> Iterator[None]:
        try:
            yield
        except (Corrupt, UsageError):
            raise
        except TemplateSyntaxError as error:
            where = f"{self._tokenizer.directory} cannot be read: {error.message}, line {error.lineno}"
            raise UsageError(f"data.template: the chat template of {where}") from error
        except Exception as error:  # a template raises what it likes about a row
            raise Corrupt(f"the chat template refuses it: {error}") from error

    def _written(self, conversation: Conversation) -> tuple[str, list[Part]]:
        messages, tools = conversation.messages, conversation.tools
        if not self._marks:
            text = self._render(messages, tools)
            return text, [self._turn(conversation, index, text) for index in conversation.turns]
        said = [text for message in messages for text in texts(message)]
        if any(mark in text for text in said for mark in (BEGIN, END)):
            raise Corrupt("holds U+FDD0 or U+FDD1, which are no characters")
        text, parts = _unmarked(self._render(messages, tools, template=self._marked))
        if not conversation.every_turn:
            turns = [self._turn(conversation, index, text) for index in conversation.turns]
            common = [(max(a, c), min(b, d)) for a, b in parts for c, d in turns]
            parts = [(start, until) for start, until in common if start < until]
        return text, parts

    def _turn(self, conversation: Conversation, index: int, text: str) -> Part:
        """Where message `index` stands in `text`, the whole conversation; Corrupt where nobody can tell."""
        if index == 0:
            raise Corrupt("message 0: a chat template needs something before what the assistant says")
        earlier, tools = conversation.messages[:index], conversation.tools
        answer, *rest = conversation.messages[index:]
        until = self._render([*earlier, answer], tools) if rest else text
        if not text.startswith(until):
            raise Corrupt(
                f"message {index}: the chat template writes it differently when the conversation goes on;"
                " data.learn: last_turn learns only the last one"
            )
        start = self._render(earlier, tools, prompt=True)
        if not until.startswith(start):
            # The prompt opens what the turn is written without, such as thoughts: learned is the turn from
            # where any answer begins.
            other = self._render([*earlier, {**answer, "content": END}], tools)
            pairs = zip(start, other, strict=False)
            start = start[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))]
            begins = other[len(start) : other.find(END)]
            if not (until.startswith(start) and (not begins or begins.strip().endswith(THOUGHT))):
                what = "the chat template's prompt for it is not what it is written after"
                raise Corrupt(f"message {index}: {what}")
        return len(start), len(until)

    def _render(
        self, messages: list[Message], tools: Tools, *, prompt: bool = False, template: str = ""
    ) -> str:
        with _limited(lambda: self._refuse(messages)):
            if any("tool_calls" in message for message in messages) and self._joins_arguments:
                messages = [_with_text(message) for message in messages]
            return self._tokenizer.render(messages, tools, template or self._template, prompt=prompt)

    @functools.cached_property
    def _joins_arguments(self) -> bool:
        """Whether the template joins the arguments of a call to text, as DeepSeek-V3's does, so as JSON."""

        def writes(message: Message) -> bool:
            asked: Message = {"role": "user", "content": "?"}
            try:
                return bool(self._tokenizer.render([asked, message], None, self._template, prompt=False))
            except (TypeError, TemplateError):
                return False

        function = {"name": "f", "arguments": {"a": 1}}
        call: Message = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        }
        return not writes(call) and writes(_with_text(call))

    def _refuse(self, messages: Sequence[Message]) -> NoReturn:
        begins = repr("".join(texts(messages[0])))[:60]
        raise UsageError(
            f"data.template: the chat template of {self._tokenizer.directory} came to no end in"
            f" {RENDERING_SECONDS} s of computing, on the conversation that begins {begins}; mend it, or use"
            " data.template: plain"
        )


def _with_text(message: Message) -> Message:
    """The message with the arguments of its calls as JSON, and nothing said beside them as no content."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        text = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": text}})
    return {**message, "content": message["content"] or None, "tool_calls": calls}


def _refuse_left_out(message: Message, learned: Sequence[str]) -> None:
    """Raises Corrupt for what the assistant says and nobody would learn; a template may strip white space."""
    *thoughts, answer = message["content"].split(THOUGHT)
    if not any(answer.strip() in part for part in learned):
        said = repr(answer.strip()[:40])
        raise Corrupt(f"the chat template does not write what the assistant says: {said}")
    if thoughts and not any(THOUGHT in part for part in learned):
        raise Corrupt(f"the chat template leaves out the assistant's thoughts (up to {THOUGHT})")
    for call in message.get("tool_calls", ()):
        if not any(call["function"]["name"] in part for part in learned):
            raise Corrupt(f"the chat template does not write the call of {call['function']['name']!r:.40}")


def _mark(tag: re.Match[str]) -> str:
    """The tag's place as a character; written as a block, so that white space around it goes as before."""
    before, end, after = tag.groups()
    return f"{{%{before} if true %}}{END if end else BEGIN}{{% endif {after}%}}"


def _unmarked(text: str) -> tuple[str, list[Part]]:
    """The text without marks, and the parts between them."""
    pieces = re.split(f"[{BEGIN}{END}]", text)  # every other piece stood between two marks
    ends = list(accumulate(map(len, pieces)))
    parts = zip(ends[::2], ends[1::2], strict=False)
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
