"""What a chat template may take: time, memory and text, in a process of its own; what is said beyond it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bundle.data import rendering
from bundle.data.chat import ChatTemplate
from bundle.data.conversations import read_conversation
from bundle.data.sources import CorruptData
from bundle.data.tokenizers import HuggingFaceTokenizer
from bundle.errors import UsageError
from bundle.recipe.data import Data
from tests.data import chat

pytestmark = pytest.mark.processes
DATA = Data(source="jsonl", path=("rows.jsonl",), sequence_length=64)
# Loops for as long as no row says otherwise: 2 s are a limit of each rendering, not of all.
OF_ONE_ROW = (
    "{% if messages[0].content == 'long' %}" + chat.ENDLESS + "{% else %}" + chat.SIMPLE + "{% endif %}"
)


def talk(question):
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "a"}]
    return read_conversation({"messages": messages}, DATA)


@pytest.fixture
def template(tmp_path):
    return lambda source: ChatTemplate(HuggingFaceTokenizer(chat.directory(tmp_path / "tokenizer", source)))


def children():
    """The processes that this one has started."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_a_row_for_which_a_template_takes_too_long_is_corrupt_and_a_second_one_stops_the_job(template):
    made = template(OF_ONE_ROW)
    before = time.monotonic()
    rows = [made.prepare_render_request(talk(question)) for question in ("short", "long", "after")]
    first, second, third = made.draft(rows)
    assert isinstance(second, CorruptData) and f"{rendering.MAX_RENDERING_CPU_SECONDS} s" in str(second)
    written = [chat.write_simply(talk(question).messages) for question in ("short", "after")]
    assert [each[0][0][0] for each in (first, third)] == written
    with pytest.raises(UsageError, match=r"data\.template"):
        made.draft(rows[1:2])
    assert time.monotonic() - before < 60
    assert len(made.draft(rows[:1])) == 1  # a process starts anew


@pytest.mark.parametrize("source", ["{{ 'x' * 10**10 }}", "{{ 'x' * 8000001 }}", "{% set a = [0] * 10**9 %}"])
def test_memory_and_text_have_limits_of_their_own(template, source):
    made, before = template(source + chat.SIMPLE), time.process_time()
    with pytest.raises(CorruptData, match=r"1,024 MiB|8 MB"):
        chat.drafts(made, talk("q"))
    assert time.process_time() - before < 2


def test_a_computation_that_python_cannot_interrupt_ends_too(template):
    made = template("{% if 7 ** (10 ** 9) %}{% endif %}" + chat.SIMPLE)
    with pytest.raises(CorruptData, match="s of computing"):
        chat.drafts(made, talk("q"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{% set n = namespace(_a=1) %}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ dict.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_does_not_leave_its_sandbox(template, source):
    with pytest.raises(CorruptData, match="refuses the row"):
        chat.drafts(template(source + chat.SIMPLE), talk("q"))


def test_the_process_ends_with_the_template(template):
    before, made = children(), template(chat.SIMPLE)
    assert not children() - before  # it starts when it is needed
    chat.drafts(made, talk("q"))
    (process,) = children() - before
    del made
    assert process not in children()


def test_the_process_writes_no_file_and_ends_with_its_requests():
    words = [sys.executable, "-P", str(Path(rendering.__file__))]
    said = subprocess.run(words, input="", capture_output=True, text=True, timeout=60)
    assert said.stdout == "" and signal.SIGPROF


@pytest.mark.parametrize("mark", ["\ufdd0", "\ufdd1", "\ufdd2"])
def test_characters_that_are_none_are_refused_and_their_names_are_text(template, mark):
    made = template(chat.SIMPLE)
    with pytest.raises(CorruptData, match="not characters"):
        chat.drafts(made, talk(f"a{mark}b"))
    ((text, _),) = chat.drafts(made, talk(f"\\ufdd{ord(mark) % 16}"))
    assert text.startswith("<user>\\ufdd")
