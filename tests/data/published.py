"""Chat templates of the shapes that published models have, and what each writes of a turn.

The wording is ours. What each does about turns, thoughts, tools and system messages is what the models named
do. `says` of a shape is written by hand: what the assistant writes in a turn, or None where the template
leaves
any of it out.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

Message = dict[str, Any]


class Shape(NamedTuple):
    """A template, and what it does with what conversations may have."""

    template: str
    says: Callable[[Message], str | None]
    tools: bool = True
    refuses_system: str = ""  # the template's own words
    opens: str = ""  # what its prompt opens that no turn is written with
    joins_arguments: bool = False  # of a call, as text


_CALL, _JOINED = "<tool_call>{} {}</tool_call>", "<call>{}\n{}</call>"
_TAG = "<think>\n{}\n</think>\n\n"
_SPLIT = (
    "{% set thought = m.reasoning_content if m.reasoning_content is string else '' %}"
    "{% set said = m.content %}"
    "{% if not thought and '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)
_TOOLS = "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
_CALLS = (
    "{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
)
_RESULT = (
    "{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}\n<tool_response>\n"
    "{{ m.content }}\n</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
)


def split(message: Message) -> tuple[str | None, str]:
    """The thoughts of a message and its answer, however the thoughts are given."""
    *inside, answer = message["content"].split("</think>")
    given = message.get("reasoning_content")
    if given is None and inside:
        given = inside[0].removeprefix("<think>").strip("\n")
    return given, answer.lstrip("\n")


def calls(message: Message, form: str = _CALL) -> str:
    """The calls of a message, one after the other."""
    functions = (call["function"] for call in message.get("tool_calls", ()))
    return "".join(form.format(of["name"], json.dumps(of["arguments"])) for of in functions)


def _plain(end: str, form: str = _CALL) -> Callable[[Message], str | None]:
    """The content as it stands; thoughts beside it are left out."""
    return lambda m: None if "reasoning_content" in m else m["content"] + calls(m, form) + end


def _chatml(default: str, assistant: str, *, prompt: str = "", before: str = "") -> str:
    return (
        "{% if tools or messages[0].role == 'system' %}<|im_start|>system\n"
        "{{ messages[0].content if messages[0].role == 'system' else '"
        + default
        + "' }}"
        + _TOOLS
        + "<|im_end|>\n"
        "{% elif '"
        + default
        + "' %}<|im_start|>system\n"
        + default
        + "<|im_end|>\n{% endif %}"
        + before
        + "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
        "{% elif m.role == 'tool' %}"
        + _RESULT
        + "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
        + assistant
        + _CALLS
        + "<|im_end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        + prompt
        + "{% endif %}"
    )


_LAST_QUERY = (
    "{% set ns = namespace(multi=true, last=messages|length - 1) %}{% for m in messages[::-1] %}"
    "{% if ns.multi and m.role == 'user' %}{% set ns.multi = false %}"
    "{% set ns.last = messages|length - 1 - loop.index0 %}{% endif %}{% endfor %}"
)
# Thoughts stay behind the last question alone; the last message has some, be they none.
_QWEN3 = _SPLIT + (
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n"
    "{% endif %}{{ said }}"
)
_HEADER = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
_LLAMA = (
    "<|begin_of_text|>{% if messages[0].role == 'system' %}{% set first = messages[0].content | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set first = '' %}{% endif %}"
    "<|start_header_id|>system<|end_header_id|>\n\n{{ first }}<|eot_id|>"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
    "{% elif 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at once') }}{% endif %}"
    + _HEADER
    + "{% set f = m.tool_calls[0].function %}"
    "{{ '{\"name\": \"' + f.name + '\", \"parameters\": ' + f.arguments | tojson + '}' }}<|eot_id|>"
    "{% else %}"
    + _HEADER
    + "{% if loop.first and tools %}"
    + _TOOLS
    + "{% endif %}{{ m.content | trim }}<|eot_id|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Tools stand before the last question alone, and the system message in it while nobody has answered.
_MISTRAL = (
    "<s>{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% set questions = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% set ns = namespace(turn=0) %}"
    "{% for m in messages %}{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.turn % 2 == 0) %}"
    "{{ raise_exception('roles must take turns') }}{% endif %}"
    "{% set ns.turn = ns.turn + 1 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and m == questions[-1] %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ system + '\n\n' if loop.last and system is defined else '' }}{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    "{% if c.id is not defined or c.id | length != 9 %}"
    "{{ raise_exception('an id has 9 letters') }}{% endif %}"
    "{{ c.function | tojson }}{% endfor %}]</s>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content | tojson }}[/TOOL_RESULTS]"
    "{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"
)
_GEMMA = (
    "<bos>{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}"
    "{% else %}{% set first = '' %}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ first if loop.first else '' }}"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Earlier Gemmas have no system role.
_GEMMA2 = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + _GEMMA


def _deepseek(said: str, prompt: str) -> str:
    return (
        "{% set ns = namespace(tool=false, system='') %}"
        "{% for m in messages %}{% if m.role == 'system' %}{% set ns.system = ns.system + m.content %}"
        "{% endif %}{% endfor %}"
        "<bos>{{ ns.system }}" + _TOOLS + "{% for m in messages %}"
        "{% if m.role == 'user' %}{% set ns.tool = false %}<User>{{ m.content }}{% endif %}"
        "{% if m.role == 'assistant' and m.tool_calls %}{% set ns.tool = false %}<Assistant>"
        "{{ m.content or '' }}"
        "{% for c in m.tool_calls %}"
        "{{ '<call>' + c.function.name + '\n' + c.function.arguments + '</call>' }}{% endfor %}"
        "<eos>{% elif m.role == 'assistant' %}" + said + "{% endif %}"
        "{% if m.role == 'tool' %}{% set ns.tool = true %}<output>{{ m.content }}</output>{% endif %}"
        "{% endfor %}{% if ns.tool %}<outputs_end>{% endif %}"
        "{% if add_generation_prompt and not ns.tool %}<Assistant>" + prompt + "{% endif %}"
    )


_CUT = "{% set said = m.content.split('</think>')[-1] %}"
_ANSWER = "{{ ('<outputs_end>' if ns.tool else '<Assistant>') + said }}<eos>{% set ns.tool = false %}"
_GLM = (
    "[gMASK]<sop>{% if tools %}<|system|>\n" + _TOOLS + "{% endif %}{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{{ '/nothink' if enable_thinking is defined and not enable_thinking else '' }}"
    "{% elif m.role == 'assistant' %}<|assistant|>"
    + _SPLIT
    + "{{ '\n<think>' + (thought if loop.index0 > ns.last else '') + '</think>' }}"
    "{% if said.strip() %}{{ '\n' + said.strip() }}{% endif %}"
    + _CALLS
    + "{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|observation|>{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}<|system|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{{ '\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}{% endif %}"
)
_KIMI = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}"
    "{% if loop.first and m.role != 'system' %}<|im_system|>system<|im_middle|>Kimi.<|im_end|>{% endif %}"
    "<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}" + _CALLS + "<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
_ANALYSIS = "<|channel|>analysis<|message|>"
# Thoughts stand before the last answer alone, and before calls until there is an answer.
_GPT_OSS = (
    "<|start|>system<|message|>On {{ strftime_now('%Y-%m-%d') }}.<|end|>"
    "{% if messages[0].role == 'system' or tools %}<|start|>developer<|message|>"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{% set messages = messages[1:] %}{% endif %}"
    + _TOOLS
    + "<|end|>{% endif %}{% set tool = namespace(name=none) %}"
    "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}"
    "{% set later = namespace(answer=false) %}"
    "{% for n in messages[loop.index:] %}{% if n.role == 'assistant' and not n.tool_calls %}"
    "{% set later.answer = true %}{% endif %}{% endfor %}"
    "{% set thought = m.content or m.thinking %}"
    "{% if thought and not later.answer %}<|start|>assistant" + _ANALYSIS + "{{ thought }}<|end|>{% endif %}"
    "{% set tool.name = m.tool_calls[0].function.name %}<|start|>assistant to=functions.{{ tool.name }}"
    "<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' and loop.last and not add_generation_prompt %}"
    "{% if m.thinking %}<|start|>assistant" + _ANALYSIS + "{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'tool' %}{% if tool.name is none %}"
    "{{ raise_exception('no call before it') }}{% endif %}"
    "<|start|>functions.{{ tool.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_PHI = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"
)


def _qwen3(message: Message) -> str:
    thought, answer = split(message)
    return _TAG.format(thought or "") + answer + calls(message) + "<|im_end|>\n"


def _llama(message: Message) -> str | None:
    if "reasoning_content" in message or ("tool_calls" in message and message["content"]):
        return None
    form = '{{"name": "{}", "parameters": {}}}'
    return (calls(message, form) if "tool_calls" in message else message["content"].strip()) + "<|eot_id|>"


def _mistral(message: Message) -> str | None:
    if "reasoning_content" in message or ("tool_calls" in message and message["content"]):
        return None
    if "tool_calls" in message:
        return "[TOOL_CALLS] [" + json.dumps(message["tool_calls"][0]["function"]) + "]</s>"
    return f" {message['content'].strip()}</s>"


def _answer(end: str) -> Callable[[Message], str | None]:
    """The answer alone; thoughts are left out."""
    return lambda m: None if split(m)[0] is not None else m["content"] + calls(m, _JOINED) + end


def _glm(message: Message) -> str:
    thought, answer = split(message)
    return f"\n<think>{thought or ''}</think>" + (f"\n{answer}" if answer else "") + calls(message)


def _gpt_oss(message: Message) -> str:
    thought, content = message.get("reasoning_content"), message["content"]
    if "tool_calls" in message:
        thought, function = content or thought, message["tool_calls"][0]["function"]
        analysis = f"{_ANALYSIS}{thought}<|end|><|start|>assistant" if thought else ""
        call = f" to=functions.{function['name']}<|channel|>commentary json<|message|>"
        return analysis + call + json.dumps(function["arguments"]) + "<|call|>"
    analysis = f"{_ANALYSIS}{thought}<|end|><|start|>assistant" if thought else ""
    return f"{analysis}<|channel|>final<|message|>{content}<|return|>"


SHAPES = {
    "qwen2.5": Shape(_chatml("You are Qwen.", "{{ m.content }}"), _plain("<|im_end|>\n")),
    "qwen3": Shape(_chatml("", _QWEN3, before=_LAST_QUERY), _qwen3),
    "qwen3-instruct-2507": Shape(_chatml("", "{{ m.content }}"), _plain("<|im_end|>\n")),
    "llama-3.1": Shape(_LLAMA, _llama),
    "mistral": Shape(_MISTRAL, _mistral),
    "gemma-2": Shape(_GEMMA2, _plain("<end_of_turn>\n"), tools=False, refuses_system="no system role"),
    "gemma-3": Shape(_GEMMA, _plain("<end_of_turn>\n"), tools=False),
    "deepseek-v3": Shape(
        _deepseek("{% set said = m.content %}" + _ANSWER, ""), _plain("<eos>", _JOINED), joins_arguments=True
    ),
    "deepseek-r1": Shape(
        _deepseek(_CUT + _ANSWER, "<think>\n"), _answer("<eos>"), opens="<think>\n", joins_arguments=True
    ),
    "glm-4.5": Shape(_GLM, _glm),
    "kimi-k2": Shape(_KIMI, _plain("<|im_end|>")),
    "gpt-oss": Shape(_GPT_OSS, _gpt_oss),
    "phi-4": Shape(_PHI, _plain("<|im_end|>"), tools=False),
    "mimo": Shape(_chatml("You are MiMo.", "{{ m.content }}"), _plain("<|im_end|>\n")),
}
