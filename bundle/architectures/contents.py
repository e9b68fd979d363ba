"""What a Hugging Face directory holds, told by the names of its files."""

from pathlib import Path

from bundle import files
from bundle.errors import UsageError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# A directory with a tokenizer has at least one of these.
TOKENIZER = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
SETTINGS, CHAT_TEMPLATE = "tokenizer_config.json", "chat_template.jinja"


def has_weights(directory: Path) -> bool:
    """Return whether a directory holds weights; nothing of them is read."""
    return any(files.is_file(directory / name) for name in (SINGLE, INDEX))


def has_tokenizer(directory: Path) -> bool:
    """Return whether a directory holds a tokenizer; its files are not looked at."""
    paths = (path for pattern in TOKENIZER for path in directory.glob(pattern))
    return files.is_directory(directory) and any(map(files.is_file, paths))


def has_chat_template(directory: Path) -> bool:
    """Return whether the tokenizer of a directory has a chat template, where transformers looks for one."""
    if files.is_file(directory / CHAT_TEMPLATE):
        return True
    try:
        return bool(files.json_object(directory / SETTINGS).get("chat_template"))
    except UsageError:
        return False
