"""Tell what a Hugging Face directory holds by the names of its files."""

from pathlib import Path

from bundle import files
from bundle.errors import UsageError

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
# A directory with a tokenizer has at least one of these.
TOKENIZER_PATTERNS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
TOKENIZER_CONFIG, CHAT_TEMPLATE_FILE = "tokenizer_config.json", "chat_template.jinja"


def has_weights(directory: Path) -> bool:
    """Return whether a directory holds weights; no weights are read."""
    return any(files.is_file(directory / name) for name in (SINGLE_FILE, INDEX_FILE))


def has_tokenizer(directory: Path) -> bool:
    """Return whether a directory holds a tokenizer; its files are not read."""
    paths = (path for pattern in TOKENIZER_PATTERNS for path in directory.glob(pattern))
    return files.is_directory(directory) and any(map(files.is_file, paths))


def has_chat_template(directory: Path) -> bool:
    """Return whether the tokenizer of a directory has a chat template, where transformers looks for one."""
    if files.is_file(directory / CHAT_TEMPLATE_FILE):
        return True
    try:
        return bool(files.read_json_object(directory / TOKENIZER_CONFIG).get("chat_template"))
    except UsageError:
        return False
