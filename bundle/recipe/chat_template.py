"""Chat templates that a recipe names: a jinja file, or one that comes with the package."""

import re
from pathlib import Path

from bundle import files
from bundle.errors import UsageError, find_nearest, format_suggestion

# Roles as headings; nothing but the texts; the tokenizer's own.
PLAIN_TEMPLATE, NO_TEMPLATE, TOKENIZER_TEMPLATE = "plain", "none", "chat"
NAMES_WITHOUT_FILE = (PLAIN_TEMPLATE, NO_TEMPLATE, TOKENIZER_TEMPLATE)
TEMPLATE_DIRECTORY = Path(__file__).parent / "templates"
TEMPLATE_SUFFIX = ".jinja"
MOST_BYTES = 2**20  # bytes; published ones have less than 2**15
_MESSAGES_PATTERN = re.compile(r"\bmessages\b")


def list_built_in() -> list[str]:
    """Return the names of the templates that come with the package, sorted."""
    return sorted(path.stem for path in TEMPLATE_DIRECTORY.glob(f"*{TEMPLATE_SUFFIX}"))


def is_text(value: str) -> bool:
    """Return whether a value of data.template is a template itself, and no name or file."""
    return "{{" in value or "{%" in value or "\n" in value


def read_built_in_or_file(name: str) -> str:
    """Return the text of a built-in template or of a file. Raise UsageError where there is none."""
    names = list_built_in()
    if name not in names and not name.endswith(TEMPLATE_SUFFIX):
        allowed = (*NAMES_WITHOUT_FILE, *names)
        near = format_suggestion(find_nearest(name, allowed))
        raise UsageError(f"{name} is not a template{near}. Use {', '.join(allowed)} or FILE{TEMPLATE_SUFFIX}")
    path = TEMPLATE_DIRECTORY / f"{name}{TEMPLATE_SUFFIX}" if name in names else Path(name)
    try:
        text = files.read_content(path, MOST_BYTES).decode()
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}. Name a file with a chat template") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: not UTF-8 text ({error}). Name a file with a chat template") from error
    if reason := explain_missing_messages(text):
        raise UsageError(f"{name}: {reason}")
    return text


def explain_missing_messages(text: str) -> str:
    """Return why a text is not a chat template; empty where it may be one."""
    if _MESSAGES_PATTERN.search(text):
        return ""
    return "the template does not read `messages`, the conversation. Loop over `messages` in it"
