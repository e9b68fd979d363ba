"""Rows of preferences: a better and a worse answer to one prompt, as two conversations."""

from itertools import takewhile

from bundle.data import media
from bundle.data.conversations import UNREAD, Conversation, Message, answered, listed, of_messages
from bundle.data.sources import Corrupt, Values, text_of
from bundle.recipe.data import Data, Fields


def columns(fields: Fields) -> tuple[str, ...]:
    """All fields of a row that `preference` reads."""
    named = (fields.chosen, fields.rejected, fields.prompt, fields.messages, fields.system, fields.tools)
    return (*filter(None, named), *media.keys_of(fields), *UNREAD)


def preference(values: Values, data: Data) -> tuple[Conversation, Conversation]:
    """The conversations of a row, the better one first; nothing of their prompt is learned.

    Raises Corrupt saying which field is wrong, and how.
    """
    fields = data.fields
    chosen, rejected = (_answer(values, name) for name in (fields.chosen, fields.rejected))
    if _whole(chosen) != _whole(rejected):
        raise Corrupt(
            f"fields {fields.chosen} and {fields.rejected}: only one of them begins with its prompt"
        )
    if _whole(chosen):
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
        prompt = [message for message, _ in pairs]
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        if not prompt and (chosen or rejected):
            raise Corrupt(f"fields {fields.chosen} and {fields.rejected}: begin with different prompts")
    else:
        prompt = _prompt(values, fields)
    if chosen == rejected:
        raise Corrupt(f"fields {fields.chosen} and {fields.rejected}: the same, so that neither is better")
    if not chosen or not rejected:
        raise Corrupt(f"fields {fields.chosen} and {fields.rejected}: one is how the other begins")
    better, worse = (
        of_messages([dict(message) for message in (*prompt, *answer)], values, data, len(prompt))
        for answer in (chosen, rejected)
    )
    return better, worse


def _answer(values: Values, name: str) -> list[Message]:
    """What stands in a field: a text, a message, or messages, of which the last is the assistant's."""
    given = values.get(name)
    if isinstance(given, dict):
        given = [given]
    if isinstance(given, list):
        return answered(given, name)
    return [{"role": "assistant", "content": text_of(values, name)}]


def _whole(answer: list[Message]) -> bool:
    """Whether it is a conversation with its prompt."""
    return bool(answer[0]["role"] != "assistant")


def _prompt(values: Values, fields: Fields) -> list[Message]:
    """What both answers follow, by the first of the two fields that the row has."""
    for name in (fields.prompt, fields.messages):
        given = values.get(name)
        if isinstance(given, list):
            messages = listed(given, name)
            if messages[-1]["role"] == "assistant":
                raise Corrupt(f"field {name}: ends with what the assistant says, which the answers are to do")
            return messages
        if given is not None:
            return [{"role": "user", "content": text_of(values, name)}]
    raise Corrupt(
        f"no prompt: neither field {fields.prompt} nor {fields.messages}, and {fields.chosen} and"
        f" {fields.rejected} are no conversations that begin with one"
    )
