"""Rows to conversations, and these to token ids and their loss mask, by plain headings or a chat template."""

import functools
import json
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from itertools import accumulate, takewhile
from typing import Any, NoReturn

import numpy as np
from jinja2 import TemplateError, TemplateSyntaxError  # torch needs it, too

from bundle.data import media
from bundle.data.media import Medium
from bundle.data.sources import Corrupt, Values, text_of
from bundle.data.store import Document
from bundle.data.tokenizers import HuggingFace, Tokenizer
from bundle.errors import UsageError, shown
from bundle.recipe.data import Data, Fields

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None  # JSON schemas of the functions that may be called
ROLES = ("system", "developer", "user", "assistant", "tool")
# What ShareGPT, ms-swift and OpenAI's older format call them.
ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
    "tool_response": "tool",
    "function": "tool",
}
CALLS = ("function_call", "tool_call")
# Whether a turn is learned, in the words of OpenAI, ms-swift and axolotl.
FLAGS = ("weight", "loss", "train")
SHAREGPT = "conversations"
INSTRUCTION, INPUT, OUTPUT, HISTORY = ALPACA = ("instruction", "input", "output", "history")
UNREAD = ("audios",)  # of what rows have beside text


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates take them, and which of them, by number, are learned."""

    messages: list[Message]  # role, content (text, or parts: text, images, videos), what else one may read
    turns: Sequence[int]
    tools: Tools = None
    media: Sequence[Medium] = ()  # images and videos, in the order of their places

    @property
    def every_turn(self) -> bool:
        """Whether all that the assistant says is learned."""
        return len(self.turns) == [message["role"] for message in self.messages].count("assistant")


def texts(message: Message) -> list[str]:
    """What a message says, between its images and videos."""
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]


def columns(fields: Fields) -> tuple[str, ...]:
    """All fields of a row that `conversation` reads."""
    named = (fields.messages, fields.prompt, fields.response, fields.system, fields.tools)
    return (*filter(None, (*named, fields.images, fields.videos)), SHAREGPT, *ALPACA, *UNREAD)


def conversation(values: Values, data: Data) -> Conversation:
    """The conversation of a row. Raises Corrupt saying which field is wrong, and how."""
    return of_messages(_messages(values, data.fields), values, data)


def of_messages(messages: list[Message], values: Values, data: Data, prompt: int = 0) -> Conversation:
    """A conversation of these messages, with what else its row says; the first `prompt` are not learned."""
    if unread := [name for name in UNREAD if values.get(name)]:
        raise Corrupt(f"field {unread[0]}: only text, images and videos can be trained on")
    answers = len(messages) - prompt
    messages = _with_system(messages, values, data.fields.system)
    weights = [message.pop(FLAGS[0], True) for message in messages]
    answering = range(len(messages) - answers, len(messages))
    turns = [index for index in answering if messages[index]["role"] == "assistant" and weights[index]]
    if data.learn == "last_turn":
        turns = [index for index in turns if index == len(messages) - 1]
    if not turns:
        raise Corrupt("no turn that is learned: the assistant's have no weight")
    fields = {media.IMAGE: data.fields.images, media.VIDEO: data.fields.videos}
    columns = {kind: values.get(name) for kind, name in fields.items() if name}
    found = media.placed(messages, columns)
    return Conversation(messages, turns, _tools(values, data.fields.tools), found)


def _messages(values: Values, fields: Fields) -> list[Message]:
    """The messages, by the first format of which the row has all fields; null is missing, as in a table."""
    formats = (
        ((fields.messages,), lambda: answered(values[fields.messages], fields.messages)),
        (
            (fields.prompt, fields.response),
            lambda: _dialogue([(text_of(values, fields.prompt), text_of(values, fields.response))]),
        ),
        ((SHAREGPT,), lambda: answered(values[SHAREGPT], SHAREGPT)),
        ((INSTRUCTION, OUTPUT), lambda: _alpaca(values)),
    )

    def likeness(names: Sequence[str]) -> tuple[bool, int, bool]:
        given = sum(values.get(name) is not None for name in names)
        whole = given == len(names)
        return whole, 0 if whole else given, any(name in values for name in names)

    names, read = max(formats, key=lambda one: likeness(one[0]))
    if not any(name in values for name in names):
        known = "; ".join(" and ".join(names) for names, _ in formats)
        have = ", ".join(values)[:200] or "no fields"
        raise Corrupt(f"no conversation: none of the fields {known}; the row has {have}")
    return read()


def _dialogue(turns: Sequence[Sequence[str]]) -> list[Message]:
    """Messages of (question, answer) each."""
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]


def _alpaca(values: Values) -> list[Message]:
    """Instruction and input are one question, a line each; before it come the turns of the history."""
    for name in (INSTRUCTION, INPUT):
        if not isinstance(values.get(name) or "", str):
            raise Corrupt(f"field {name}: must be text, is {shown(values[name])}")
    question = "\n".join(text for name in (INSTRUCTION, INPUT) if (text := values.get(name) or "").strip())
    if not question:
        raise Corrupt(f"fields {INSTRUCTION} and {INPUT}: must be text, are blank")
    history = values.get(HISTORY) or []
    if not isinstance(history, list) or not all(map(_is_turn, history)):
        raise Corrupt(f"field {HISTORY}: must be a list of [question, answer], is {shown(history)}")
    return _dialogue([*history, (question, text_of(values, OUTPUT))])


def _is_turn(given: Any) -> bool:
    texts = given if isinstance(given, list) and len(given) == 2 else ("", "")
    return all(isinstance(text, str) and bool(text.strip()) for text in texts)


def _with_system(messages: list[Message], values: Values, name: str | None) -> list[Message]:
    """The messages, after the row's own system message where it has one beside them."""
    if name is None or values.get(name) in (None, ""):
        return messages
    system = text_of(values, name)
    if messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": system}, *messages]
    if messages[0]["content"] != system:
        raise Corrupt(f"field {name}: the messages begin with another system message")
    return messages


def _tools(values: Values, name: str | None) -> Tools:
    if name is None or values.get(name) in (None, ""):
        return None
    tools = _parsed(values[name], f"field {name}")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Corrupt(f"field {name}: must be a list of objects, or JSON of one, is {shown(tools)}")
    return tools or None


def listed(given: Any, field: str) -> list[Message]:
    """A list of {role, content} or {from, value} as messages: role, content and, where given, weight."""
    if not isinstance(given, list) or not given:
        raise Corrupt(f"field {field}: must be a list of messages, is {shown(given)}")
    return [_message(one, f"field {field}[{index}]") for index, one in enumerate(given)]


def answered(given: Any, field: str) -> list[Message]:
    """As `listed`; the last one must be the assistant's."""
    messages = listed(given, field)
    last = messages[-1]
    if last["role"] != "assistant" or not (last["content"].strip() or "tool_calls" in last):
        raise Corrupt(f"field {field}: must end with what the assistant says")
    return messages


def _message(given: Any, where: str) -> Message:
    rest: Message = {}
    if isinstance(given, dict):
        rest = {key: value for key, value in given.items() if value is not None}
    names = ("role", "content") if "role" in rest else ("from", "value")
    role, content = (rest.pop(name, None) for name in names)
    if role in CALLS:
        role, content, rest["tool_calls"] = "assistant", None, content
    role = ALIASES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise Corrupt(f"{where}: must be an object with a role of {', '.join(ROLES)}, is {shown(given)}")
    if weights := [rest.pop(name) for name in FLAGS if name in rest]:
        if any(weight not in (0, 1) or weight != weights[0] for weight in weights):
            raise Corrupt(f"{where}: {', '.join(FLAGS)} say whether it is learned: 0 or 1, {shown(given)}")
        if weights[0] and role != "assistant":
            raise Corrupt(f"{where}: has a weight, but only what the assistant says is learned")
        rest[FLAGS[0]] = bool(weights[0])
    calls = [rest.pop("function_call")] if "function_call" in rest else rest.pop("tool_calls", None)
    if calls:
        rest["tool_calls"] = _calls(calls, f"{where}.tool_calls")
        content = "" if content is None else content
    content = _content(content, f"{where}: content")
    if role == "assistant" and not isinstance(content, str):
        raise Corrupt(f"{where}: the assistant says text, and this has an image or a video")
    return {"role": role, "content": content, **rest}


def _content(given: Any, where: str) -> str | list[dict[str, Any]]:
    """The text of a message, of its parts one after the other; the parts where not all of them are text."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not given or not all(isinstance(part, dict) for part in given):
        raise Corrupt(f"{where} must be text, is {shown(given)}")
    parts = []
    for part in given:
        if part.get("type") in media.TYPES:
            parts.append(media.part(part, where))
        elif part.get("type") == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        else:
            raise Corrupt(f"{where} has a part {shown(part)}: only text, images and videos can be trained on")
    if any(part["type"] in media.KINDS for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _calls(given: Any, where: str) -> list[dict[str, Any]]:
    """Calls of functions as {type, function: {name, arguments}}, the arguments as an object."""
    given = _parsed(given, where)
    calls = []
    for call in given if isinstance(given, list) else [given]:
        function = call.get("function", call) if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        arguments = {} if arguments in (None, "") else _parsed(arguments, f"{where}: arguments")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Corrupt(f"{where}: must be the name and arguments of a function, is {shown(call)}")
        if not isinstance(arguments, dict):
            raise Corrupt(f"{where}: arguments must be an object, or JSON of one, is {shown(arguments)}")
        identity = {"id": call["id"]} if "id" in call else {}
        made = {"name": function["name"], "arguments": arguments}
        calls.append({**identity, "type": "function", "function": made})
    return calls


def _parsed(given: Any, where: str) -> Any:
    """What a text of JSON means; anything else is meant as it is."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError as error:
        raise Corrupt(f"{where}: not JSON: {error}") from error


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
