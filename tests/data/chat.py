"""Chat templates of the shapes that published models have, and a tokenizer directory that holds one.

The wording is ours. What each does about turns, thoughts and roles is what the models named do.
"""

from pathlib import Path

import pytest

from bundle.data.sources import CorruptData

_LINES = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.role == 'assistant' %}<end>{% endif %}{% endfor %}"
)
_PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"
_OPENED = "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
REFUSAL = "roles must take turns, and this one does not"
_ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('" + REFUSAL + "') }}{% endif %}{% endfor %}"
)
_ANSWERED = "{{ m.content.split('</think>')[-1].lstrip('\n') }}"

SIMPLE = _LINES + _PROMPT
# Qwen3: thoughts, be they none, stand in what is said after the last question, and nowhere before.
THOUGHTFUL = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n"
    "{% if '</think>' in m.content %}{{ m.content.split('</think>')[0].split('<think>')[-1].strip('\n') }}"
    "{% endif %}{{ '\n</think>\n\n' }}" + _ANSWERED + "<end>"
    "{% elif m.role == 'assistant' %}" + _ANSWERED + "<end>"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}" + _PROMPT
)
# Qwen3-Thinking and QwQ: as that, and the prompt opens the thoughts.
THINKING = THOUGHTFUL.removesuffix(_PROMPT) + _OPENED
# R1 and its distills: the prompt opens thoughts, and no turn is written with any.
DISTILLED = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}<end>"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}" + _OPENED
)
# Nemotron 3: the prompt opens thoughts in other words than those of a turn that has none.
CLOSED = SIMPLE.removesuffix(_PROMPT).replace(
    "{{ m.c", "{{ '<think></think>' * (m.role == 'assistant') + m.c"
) + (_OPENED)
# Mistral: no system, roles take turns, and nothing stands between a question and its answer.
ALTERNATING = _ALTERNATING + (
    "{% for m in messages %}{% if m.role == 'user' %}[Q] {{ m.content }} [/Q]"
    "{% else %} {{ m.content }}<end>{% endif %}{% endfor %}"
)
# Gemma: as that, the assistant has another name, and blanks around what is said go.
RENAMED = _ALTERNATING + (
    "{% for m in messages %}<{{ 'model' if m.role == 'assistant' else m.role }}>\n"
    "{{ m.content | trim }}<over>\n{% endfor %}"
    "{% if add_generation_prompt %}<model>\n{% endif %}"
)
# Templates made for training say themselves what is generated.
MARKED = """
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
<assistant>
        {%- generation %}
            {{- m.content + '<end>' }}
        {%- endgeneration %}

    {%- else -%}
<{{ m.role }}>{% generation -%}  {%- endgeneration %} {{ m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<assistant>
{%- endif %}"""
MARKED_WITH_NAME = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}<assistant>{{ m.content }}<end>{% endgeneration %}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}" + _PROMPT
)
# Qwen2.5: functions stand before the conversation, calls behind what is said, answers of tools together.
CALLING = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.previtem.role != 'tool' %}<user>{% endif %}<answer>{{ m.content }}</answer>"
    "{% else %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>"
    "{% endfor %}{% if m.role == 'assistant' %}<end>{% endif %}{% endif %}{% endfor %}" + _PROMPT
)
# DeepSeek-V3 and R1: the arguments of a call are text, and what is said beside it is there or not.
JOINING = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.content is not none %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
    "{{ '<call>' + f.name + ' ' + f.arguments + '</call>' }}{% endfor %}"
    "{% if m.role == 'assistant' %}<end>{% endif %}{% endfor %}" + _PROMPT
)
FORGETFUL = SIMPLE.replace(
    "{{ m.content }}", "{% if loop.last or m.role != 'assistant' %}{{ m.content }}{% endif %}"
)
BARE = "{% for m in messages %}{{ m.content }}{% endfor %}"
SPEECHLESS = "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}" + SIMPLE
)


def write_simply(messages):
    """What SIMPLE writes of a conversation."""
    ends = {"assistant": "<end>"}
    return "".join(f"<{m['role']}>{m['content']}{ends.get(m['role'], '')}" for m in messages)


def drafts(template, conversation):
    """The texts of a conversation with their learned parts. Raises CorruptData."""
    (each,) = template.draft([template.prepare_render_request(conversation)])
    if isinstance(each, CorruptData):
        raise each
    return [draft for draft, _ in each]


def directory(
    path: Path, template: str | None = SIMPLE, merged: tuple[str, ...] = (), pad: str | None = None
) -> Path:
    """A real tokenizer of `transformers`, saved to a directory: a token per byte, and per pair `merged`."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, *merged])}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[tuple(pair) for pair in merged])
    raw = tokenizers.Tokenizer(model)
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", pad_token=pad)
    made.chat_template = template
    made.save_pretrained(path)
    return path
