"""Text to token ids: bytes, or a Hugging Face tokenizer from a local directory."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bundle.errors import EnvironmentUnfit, UsageError
from bundle.recipe.sections import BYTE_VOCABULARY

Tokens = NDArray[np.uint32]


class Tokenizer(Protocol):
    """What the data room asks of a tokenizer. `identity` names it and its content, for resumes."""

    vocab_size: int
    end_of_text: int
    identity: str

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The ids of each text, without special tokens."""
        ...


class Bytes:
    """UTF-8 bytes as ids 0 to 255; 256 ends a text."""

    vocab_size = BYTE_VOCABULARY
    end_of_text = 256
    identity = "bytes"

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The bytes of each text; half surrogate pairs (possible in JSON) become question marks."""
        return [np.frombuffer(t.encode(errors="replace"), np.uint8).astype(np.uint32) for t in texts]


class HuggingFace:
    """A tokenizer that `transformers` loads from a directory; no download, no remote code."""

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise UsageError(
                f"data.tokenizer: {directory} is no directory; hf: takes a local tokenizer directory"
            )
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            message = "a tokenizer hf:DIR needs transformers: pip install 'mcore-bundle[data]'"
            raise EnvironmentUnfit(message) from error
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"data.tokenizer: {directory} holds no tokenizer that loads: {error}") from error
        if self._tokenizer.eos_token_id is None:
            raise UsageError(f"data.tokenizer: {directory} names no eos_token, which ends documents")
        self.vocab_size = len(self._tokenizer)
        self.end_of_text = int(self._tokenizer.eos_token_id)
        self.identity = f"hf sha256:{_digest(directory)}"

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The ids of each text, without special tokens."""
        encoded = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [np.asarray(ids, np.uint32) for ids in encoded]

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer says how conversations are written."""
        return bool(self._tokenizer.chat_template)

    def chat(self, messages: Sequence[dict[str, Any]], *, prompt: bool) -> Tokens:
        """The ids of a conversation by the tokenizer's template; `prompt` opens the assistant's next turn."""
        text = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=prompt
        )
        return self.encode([text])[0]


def tokenizer(name: str, vocabulary: int) -> Tokenizer:
    """The tokenizer `bytes` or `hf:DIR`. Raises UsageError when it has more tokens than the model."""
    made: Tokenizer = Bytes() if name == "bytes" else HuggingFace(Path(name.removeprefix("hf:")))
    if made.vocab_size > vocabulary:
        raise UsageError(
            f"data.tokenizer: {name} has {made.vocab_size} tokens, the model's vocab_size is {vocabulary}"
        )
    return made


def _digest(directory: Path) -> str:
    """SHA-256 of the tokenizer's files, names included."""
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if (
            path.is_file()
            and path.suffix in {".json", ".txt", ".model", ".jinja"}
            and path.name != "config.json"
        ):
            digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
