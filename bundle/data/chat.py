"""Conversations as token ids and their loss mask, by plain headings or a chat template."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bundle.data import rendering
from bundle.data.conversations import Conversation, Message
from bundle.data.media import MEDIA_KINDS, Medium
from bundle.data.renderer import TemplateProcess
from bundle.data.rendering import Part
from bundle.data.sources import CorruptData
from bundle.data.store import TokenDocument
from bundle.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from bundle.errors import UsageError
from bundle.recipe.chat_template import NO_TEMPLATE
from bundle.recipe.data import Data

RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")  # what a conversation gives
Pieces = list[tuple[str, bool, bool]]  # text, whether the end of text follows, whether it is learned
MarkedText = tuple[str, list[Part]]  # a text and its learned parts


def build_writer(data: Data, tokenizer: Tokenizer) -> "PlainTemplate | ChatTemplate":
    """Return the writer of conversations that `data.template` selects.

    A writer turns many conversations into drafts, and drafts into tokens. Raise UsageError for a tokenizer
    without a usable chat template.
    """
    if not data.has_template:
        return PlainTemplate(tokenizer, has_headings=data.template != NO_TEMPLATE)
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise UsageError(
            f"data.template: the tokenizer {data.tokenizer} has no chat template. Set data.template: plain."
        )
    return ChatTemplate(tokenizer, data.date, data.template_arguments, data.custom_template_text)


class PlainTemplate:
    """Headings like "### User", or none, and the end of text after each turn of the assistant."""

    def __init__(self, tokenizer: Tokenizer, *, has_headings: bool = True) -> None:
        """Choose the headings; without them texts follow each other with nothing between them."""
        self._tokenizer, self._end = tokenizer, np.uint32(tokenizer.end_of_text)
        self._has_headings = has_headings

    def prepare_render_request(self, conversation: Conversation) -> Conversation:
        """Return the conversation. Raise CorruptData for what headings do not write."""
        if conversation.tools or any("tool_calls" in message for message in conversation.messages):
            raise CorruptData("data.template: 'plain' does not render tools or tool calls. Set it to 'chat'.")
        if conversation.media:
            raise CorruptData("data.template: 'plain' does not render images or videos. Set it to 'chat'.")
        return conversation

    def draft(
        self, conversations: Sequence[Conversation]
    ) -> list[list[tuple[Pieces, Sequence[Medium]]] | CorruptData]:
        """Return the draft of each conversation."""
        return [[(self._build_pieces(conversation), ())] for conversation in conversations]

    def _build_pieces(self, conversation: Conversation) -> Pieces:
        pieces = []
        for index, message in enumerate(conversation.messages):
            pieces.append((self._format_heading(message["role"]), False, False))
            answers, learned = message["role"] == "assistant", index in conversation.learned_turns
            end = "\n" if self._has_headings else ""
            pieces.append((f"{message['content']}{end}", answers, learned))
        return pieces

    def write_prompt(self, messages: list[Message]) -> Pieces:
        """Return the text before the assistant's next answer as a draft in which nothing is learned."""
        return [
            *self._build_pieces(self.prepare_render_request(Conversation(messages, ()))),
            (self._format_heading("assistant"), False, False),
        ]

    def _format_heading(self, role: str) -> str:
        return f"### {role.capitalize()}\n" if self._has_headings else ""

    def encode(self, drafts: Sequence[Pieces]) -> Iterator[TokenDocument]:
        """Yield the tokens of each draft."""
        encoded = iter(self._tokenizer.encode([text for pieces in drafts for text, _, _ in pieces]))
        for pieces in drafts:
            parts = [np.append(next(encoded), self._end) if ends else next(encoded) for _, ends, _ in pieces]
            learned = np.repeat([learned for _, _, learned in pieces], [len(part) for part in parts])
            yield TokenDocument(np.concatenate(parts), learned)


class ChatTemplate:
    """The chat template of a tokenizer or of a recipe; its errors about a row are the row's problems."""

    def __init__(
        self,
        tokenizer: HuggingFaceTokenizer,
        today: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        text: str | None = None,
    ) -> None:
        """Check the template and its arguments; a template process starts with the first request.

        `today` (YYYY-MM-DD) is the date for templates that write one. `arguments` are variables of the
        template. `text` replaces the tokenizer's template.

        Raise UsageError where there is no template, or no date for a template that writes one. Raise it also
        for an argument that the template does not read.
        """
        arguments = arguments or {}
        tokenizer.require_offsets()
        self._tokenizer, source = tokenizer, tokenizer.read_chat_template() if text is None else text
        origin = "the recipe's chat template" if text else f"the chat template of {tokenizer.directory}"
        if today is None and "strftime_now(" in source:
            raise UsageError(
                f"data.template: {origin} writes today's date (strftime_now), so tokens would change from day"
                " to day. Set the date with data.date: YYYY-MM-DD."
            )
        words = set(re.findall(r"\w+", source)) - set(RESERVED_VARIABLES)
        if unread := sorted(set(arguments) - words):
            raise UsageError(f"data.template_arguments.{unread[0]}: {origin} does not read it. Leave it out.")
        self._renderer = TemplateProcess(origin, source, {**tokenizer.template_variables, **arguments}, today)
        self._is_marked = rendering.has_generation_tag(source)

    def prepare_render_request(self, conversation: Conversation) -> tuple[str, Conversation]:
        """Return the conversation with the request for its rendering."""
        messages, turns = conversation.messages, list(conversation.learned_turns)
        return _format_json_request(messages=messages, tools=conversation.tools, turns=turns), conversation

    def draft(
        self, prepared: Sequence[tuple[str, Conversation]]
    ) -> list[list[tuple[MarkedText, Sequence[Medium]]] | CorruptData]:
        """Return the drafts of each conversation with their images and videos, or the reason why it has none.

        Where the template marks the assistant's text ({% generation %}), the marked text is learned.
        Elsewhere the text that a turn adds to the prompt before it is learned. A conversation has several
        drafts where the template rewrites turns as the conversation goes on. Raise UsageError for an unusable
        template.
        """
        replies = self._renderer.render_requests([request for request, _ in prepared])
        return [
            CorruptData(reply["corrupt"])
            if "corrupt" in reply
            else _build_drafts(reply["samples"], conversation)
            for reply, (_, conversation) in zip(replies, prepared, strict=True)
        ]

    def write_prompt(self, messages: list[Message]) -> MarkedText:
        """Return the text before the assistant's next answer as a draft in which nothing is learned.

        Raise CorruptData where the template refuses the messages.
        """
        (reply,) = self._renderer.render_requests([_format_json_request(messages=messages, prompt=True)])
        if "corrupt" in reply:
            raise CorruptData(reply["corrupt"])
        ((text, parts, _),) = reply["samples"]
        return text, parts

    def encode(self, drafts: Sequence[MarkedText]) -> Iterator[TokenDocument]:
        """Yield the tokens of each draft; a token is learned where it begins inside a learned part.

        A token that begins before a part and ends inside it is learned where the template marks the part, as
        in transformers. Otherwise the token belongs to the prompt, which the model does not write.
        """
        encoded = self._tokenizer.encode_with_offsets([text for text, _ in drafts])
        for (ids, begins, ends), (_, parts) in zip(encoded, drafts, strict=True):
            learned = np.zeros(len(ids), np.bool_)
            for start, until in parts:
                within = (begins >= start) | (ends > start) if self._is_marked else begins >= start
                learned |= within & (begins < until)
            yield TokenDocument(ids, learned)


def _format_json_request(**values: Any) -> str:
    """Return the values as JSON; what a template cannot read, such as bytes, is its type's name."""
    return json.dumps(values, default=lambda value: f"<{type(value).__name__}>")


def _build_drafts(
    samples: Sequence[tuple[str, list[Part], int]], conversation: Conversation
) -> list[tuple[MarkedText, Sequence[Medium]]]:
    """Return the draft of each sample, with the images and videos of the messages that it shows."""
    contents = [message["content"] for message in conversation.messages]
    places = [
        0 if isinstance(content, str) else sum(part["type"] in MEDIA_KINDS for part in content)
        for content in contents
    ]
    return [((text, parts), conversation.media[: sum(places[:shown])]) for text, parts, shown in samples]
