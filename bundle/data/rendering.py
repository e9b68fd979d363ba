"""Renders chat templates and says which of their text is learned; runs as a script in a process of its own.

It imports nothing of this package, so that it starts in 0.1 s and its limits of time and memory are the
template's alone. The first line that it reads is JSON of what `Template` takes. Then come requests: the
number of rows, and a line of JSON for each; every row is answered by a line.
"""

import json
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date, datetime, time
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from jinja2 import Environment, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_RENDERING_CPU_SECONDS = 2  # of computing for one rendering, which takes a millisecond
MAX_OUTPUT_BYTES = 8 * 10**6
MAX_MEMORY_BYTES = 2**30
# Unicode says that these are in no text.
BEGIN, END, PLACEHOLDER = "\ufdd0", "\ufdd1", "\ufdd2"
THOUGHT_END = "</think>"
# The keys of the assistant's thoughts outside the content; templates read the first two.
THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None
Part = tuple[int, int]  # characters of a text, from and to


class RenderingError(Exception):
    """Why a conversation cannot be written."""


class GenerationMarkedText(NamedTuple):
    """A text, and the parts of it that the template marks by {% generation %}."""

    text: str
    spans: list[Part]


class Sample(NamedTuple):
    """A text that shows the first `messages` of a conversation, and its learned parts."""

    text: str
    parts: list[Part]
    messages: int


class Generation(Extension):
    """{% generation %}: what stands in it is put between BEGIN and END."""

    tags = {"generation"}  # noqa: RUF012  # the name and the kind are jinja2's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the block as nodes; a variable that is set in it ends with it, as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (BEGIN, END))
        return [begin, nodes.Scope(body, lineno=line), end]


class _SandboxedNamespace(Namespace):
    """Takes no names that begin with an underscore, by which a template could leave the sandbox."""

    def __init__(*args: Any, **values: Any) -> None:  # a value may be called self
        if any(name.startswith("_") for name in values):
            raise TemplateError("a namespace does not allow names that begin with an underscore")
        Namespace.__init__(*args, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise TemplateError("a namespace does not allow names that begin with an underscore")
        super().__setitem__(name, value)


def has_generation_tag(source: str) -> bool:
    """Return whether a template marks what the assistant says."""
    return bool(re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source))


class Template:
    """A chat template, in an environment like the one that transformers gives it."""

    def __init__(self, source: str, variables: dict[str, Any], today: str | None) -> None:
        """Compile the template; `today` (YYYY-MM-DD) is for strftime_now. Raise TemplateSyntaxError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        _add_transformers_functions(environment, today)
        self._source, self._variables = source, variables
        with _kill_after_cpu_time():  # constants are computed here
            self._template = environment.from_string(source)
        self._is_marked = has_generation_tag(source)

    def write_prompt(self, messages: list[Message]) -> list[Sample]:
        """Return the text before the assistant's next answer, in which nothing is learned."""
        return [Sample(self._render(messages, None, prompt=True).text, [], len(messages))]

    def write(self, messages: list[Message], tools: Tools, turns: list[int]) -> list[Sample]:
        """Return samples in which each of `turns` is learned once, written as the model will be asked for it.

        One sample has all turns where the template writes them alike however the conversation goes on. Where
        it rewrites a turn later, such as without its thoughts, a sample ends with that turn.
        """
        if tools and "tools" not in self._source:
            raise RenderingError("the chat template does not render the tools of the row")
        messages = [_with_all_thought_keys(message) for message in messages]
        ends = {index: self._render(messages[: index + 1], tools) for index in turns}
        full_rendering = ends.get(len(messages) - 1) or self._render(messages, tools)
        every_turn = len(turns) == sum(message["role"] == "assistant" for message in messages)
        if (
            self._is_marked
            and every_turn
            and all(full_rendering.text.startswith(end.text) for end in ends.values())
        ):
            for index in turns:
                _check_message_fully_learned(messages[index], full_rendering.text, full_rendering.spans)
            return [Sample(full_rendering.text, full_rendering.spans, len(messages))]
        samples: list[Sample] = []
        for index in turns:
            sample = self._write_turn(messages, tools, index, ends[index])
            _check_message_fully_learned(messages[index], sample.text, sample.parts)
            if samples and sample.text.startswith(samples[-1].text):
                sample = sample._replace(parts=samples.pop().parts + sample.parts)
            samples.append(sample)
        if full_rendering.text.startswith(samples[-1].text):
            samples[-1] = samples[-1]._replace(text=full_rendering.text, messages=len(messages))
        return samples

    def _write_turn(
        self, messages: list[Message], tools: Tools, index: int, end: GenerationMarkedText
    ) -> Sample:
        """Return the sample that ends with message `index`, of which `end` is the rendering."""
        if index == 0:
            raise RenderingError(
                "message 0: an assistant message cannot be the first one for a chat template"
            )
        earlier, answer = messages[:index], messages[index]
        prompt = self._render(earlier, tools, prompt=True).text
        if end.text.startswith(prompt):
            return self._append_turn_to_prompt(prompt, end, len(prompt), index + 1)
        # The prompt opens what the turn is written without, such as thoughts: learned is the turn from
        # where any answer begins.
        probe_text = self._render([*earlier, {**answer, "content": PLACEHOLDER}], tools).text
        shared = _count_common_prefix(prompt, probe_text)
        opening, place, _ = probe_text[shared:].partition(PLACEHOLDER)
        if (
            place
            and end.text.startswith(prompt[:shared])
            and (not opening or opening.strip().endswith(THOUGHT_END))
        ):
            return self._append_turn_to_prompt(prompt[:shared], end, shared, index + 1)
        # This turn changes how earlier ones are written, and the model is asked before it does: the answer
        # stands behind what the prompt ends with, from the last message's content on.
        *before, last = earlier
        probe_prompt = self._render([*before, {**last, "content": PLACEHOLDER}], tools, prompt=True).text
        asking = prompt[_count_common_prefix(prompt, probe_prompt) :]
        other = self._render([*earlier, {"role": "assistant", "content": PLACEHOLDER}], tools).text
        at = end.text.rfind(asking, 0, _count_common_prefix(end.text, other))
        if at >= 0:
            return self._append_turn_to_prompt(prompt, end, at + len(asking), index + 1)
        raise RenderingError(
            f"message {index}: the chat template's generation prompt differs from the text before this turn"
        )

    def _append_turn_to_prompt(
        self, prompt: str, end: GenerationMarkedText, at: int, messages: int
    ) -> Sample:
        """Return the sample of `prompt` and what `end` has from character `at` on."""
        text, shift = prompt + end.text[at:], len(prompt) - at
        if self._is_marked:
            parts = [(max(0, begin + shift), until + shift) for begin, until in end.spans if until > at]
        else:
            parts = [(len(prompt), len(text))]
        return Sample(text, parts, messages)

    def _render(self, messages: list[Message], tools: Tools, *, prompt: bool = False) -> GenerationMarkedText:
        if self._needs_serialized_arguments:
            messages = [_with_serialized_arguments(message) for message in messages]
        return (
            _split_marks(self._generate(messages, tools, prompt))
            if self._is_marked
            else GenerationMarkedText(self._generate(messages, tools, prompt), [])
        )

    def _generate(self, messages: list[Message], tools: Tools, prompt: bool) -> str:
        """Return the text that the template writes."""
        arguments = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
        with _kill_after_cpu_time():
            return _join_pieces(self._template.generate(**{**self._variables, **arguments}))

    @cached_property
    def _needs_serialized_arguments(self) -> bool:
        """True if the template joins a call's arguments to text, as DeepSeek-V3's does.

        The arguments must then be JSON text.
        """
        function = {"name": "f", "arguments": {"a": 1}}
        calls = [{"id": "1", "type": "function", "function": function}]
        call: Message = {"role": "assistant", "content": "", "tool_calls": calls}

        def writes(message: Message) -> bool:
            try:
                return bool(self._generate([{"role": "user", "content": "?"}, message], None, False))
            except (TypeError, TemplateError):
                return False

        return not writes(call) and writes(_with_serialized_arguments(call))


@contextmanager
def _kill_after_cpu_time() -> Iterator[None]:
    """Let the system end this process if the body computes longer than `MAX_RENDERING_CPU_SECONDS`."""
    signal.setitimer(signal.ITIMER_PROF, MAX_RENDERING_CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _add_transformers_functions(environment: Environment, today: str | None) -> None:
    """Add what transformers adds to the filters and functions of jinja2."""

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": raise_exception, "namespace": _SandboxedNamespace}
    environment.globals["dict"] = lambda *args, **values: dict(*args, **values)
    if today is not None:
        environment.globals["strftime_now"] = datetime.combine(date.fromisoformat(today), time()).strftime


def _join_pieces(pieces: Iterator[str]) -> str:
    """Return the pieces as one text. Raises RenderingError beyond `MAX_OUTPUT_BYTES`."""
    text, size = [], 0
    for piece in pieces:
        text.append(piece)
        size += len(piece.encode(errors="replace"))
        if size > MAX_OUTPUT_BYTES:
            raise RenderingError(f"the chat template writes more than {MAX_OUTPUT_BYTES // 10**6} MB")
    return "".join(text)


def _split_marks(text: str) -> GenerationMarkedText:
    """Return the text without marks, and the parts between them."""
    pieces = re.split(f"[{BEGIN}{END}]", text)  # every other piece stood between two marks
    ends = list(accumulate(map(len, pieces)))
    spans = zip(ends[::2], ends[1::2], strict=False)
    return GenerationMarkedText("".join(pieces), [(begin, end) for begin, end in spans if begin < end])


def _count_common_prefix(first: str, other: str) -> int:
    """Return how many characters both begin with."""
    low, high = 0, min(len(first), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _with_all_thought_keys(message: Message) -> Message:
    """Return the message with its thoughts under all names that templates read, as transformers 5 does."""
    thoughts = next((message[name] for name in THOUGHT_KEYS if message.get(name) is not None), None)
    return message if thoughts is None else {**dict.fromkeys(THOUGHT_KEYS[:2], thoughts), **message}


def _with_serialized_arguments(message: Message) -> Message:
    """Return the message with the arguments of its calls as JSON, and no content where it is blank."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        text = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": text}})
    return {**message, "content": message["content"] or None, "tool_calls": calls}


def _check_message_fully_learned(message: Message, text: str, parts: Sequence[Part]) -> None:
    """Raise RenderingError where the learned text lacks something that the assistant says.

    A template may strip white space.
    """
    learned = [text[begin:until] for begin, until in parts]
    *thoughts, answer = message["content"].split(THOUGHT_END)
    if not any(answer.strip() in part for part in learned):
        raise RenderingError(f"the chat template leaves out what the assistant says: {answer.strip()[:40]!r}")
    if thoughts and not any(THOUGHT_END in part for part in learned):
        raise RenderingError(f"the chat template leaves out the assistant's thoughts (up to {THOUGHT_END})")
    for name in THOUGHT_KEYS:
        thought = message.get(name)
        if isinstance(thought, str) and not any(thought.strip() in part for part in learned):
            raise RenderingError(f"the chat template leaves out the assistant's thoughts ({name})")
    for call in message.get("tool_calls", ()):
        if not any(call["function"]["name"] in part for part in learned):
            raise RenderingError(
                f"the chat template leaves out the tool call of {call['function']['name']!r:.40}"
            )


def answer_request(template: Template, line: str) -> dict[str, Any]:
    """Return the samples of a request, or the reason why it has none."""
    try:
        request = json.loads(line)
        if "\\ufdd" in line and re.search(
            f"[{BEGIN}{END}{PLACEHOLDER}]", json.dumps(request, ensure_ascii=False)
        ):
            raise RenderingError("the row holds U+FDD0, U+FDD1 or U+FDD2, which are not characters")
        if request.pop("prompt", False):
            return {"samples": template.write_prompt(**request)}
        return {"samples": template.write(**request)}
    except RenderingError as error:
        return {"corrupt": str(error)}
    except MemoryError:
        return {"corrupt": f"the chat template needs more than {MAX_MEMORY_BYTES // 2**20:,} MiB of memory"}
    except Exception as error:  # noqa: BLE001  # a template raises what it likes about a row
        return {"corrupt": f"the chat template refuses the row: {error or type(error).__name__}"}


def main() -> None:
    """Answer requests until there are no more."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    reply: Callable[[str], dict[str, Any]]
    try:
        template = Template(**json.loads(sys.stdin.readline()))
        reply = lambda line: answer_request(template, line)  # noqa: E731
    except TemplateSyntaxError as error:
        unusable = {"unusable": f"{error.message}, line {error.lineno}"}
        reply = lambda line: unusable  # noqa: E731
    while count := sys.stdin.readline():
        for line in [sys.stdin.readline() for _ in range(int(count))]:
            print(json.dumps(reply(line)), flush=True)


if __name__ == "__main__":
    main()
