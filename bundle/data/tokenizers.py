"""Text to token ids: bytes, or a Hugging Face tokenizer from a local directory."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bundle import files, hub
from bundle.errors import EnvironmentUnfit, UsageError
from bundle.pretrained.directory import explain_tiktoken_tokenizer
from bundle.recipe.data import BYTE_VOCABULARY

Tokens = NDArray[np.uint32]
LossMask = NDArray[np.bool_]  # which tokens are
Offsets = NDArray[np.int64]
IDENTITY_FILE_SUFFIXES = {".json", ".txt", ".model", ".jinja"}  # endings of what a tokenizer is made from


class Tokenizer(Protocol):
    """What the data room needs of a tokenizer; `identity` names it and its content, for resumes."""

    vocab_size: int  # more than the highest id
    end_of_text: int
    identity: str

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the ids of each text, without special tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids for people; special tokens stand by their names."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids that stand for no text."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255; 256 ends a text."""

    vocab_size = BYTE_VOCABULARY
    end_of_text = 256
    identity = "bytes"

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the bytes of each text; half surrogate pairs (possible in JSON) become question marks."""
        return [np.frombuffer(t.encode(errors="replace"), np.uint8).astype(np.uint32) for t in texts]

    special_ids = frozenset({256})

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the bytes; an end is <end>."""
        parts = "".join(chr(i) if i < 256 else "<end>" for i in ids).encode("latin-1")
        return parts.decode(errors="replace")


class IdDisplayTokenizer(ByteTokenizer):
    """Shows ids as numbers, where the tokenizer is not known."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the ids with spaces between and around them."""
        return f" {' '.join(map(str, ids))} "


class HuggingFaceTokenizer:
    """A tokenizer that `transformers` loads from a directory; no download, no remote code."""

    def __init__(self, directory: Path) -> None:
        if not files.is_directory(directory):
            raise UsageError(
                f"data.tokenizer: {directory} is not a directory. Name a local tokenizer directory: hf:DIR."
            )
        if reason := explain_tiktoken_tokenizer(
            directory
        ):  # transformers 5 would make one with other cuts of it
            raise UsageError(f"data.tokenizer: {reason}")
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            message = (
                "data.tokenizer: hf:DIR needs transformers. Install it: pip install 'mcore-bundle[data]'."
            )
            raise EnvironmentUnfit(message) from error
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers trusts what stands in the files
            reason = (
                _find_damage(directory) or f"transformers cannot load it ({type(error).__name__}: {error})"
            )
            raise UsageError(
                f"data.tokenizer: {directory}: {reason}. Copy its files again from where it was published."
            ) from error
        if self._tokenizer.eos_token_id is None:
            raise UsageError(
                f"data.tokenizer: {directory} has no eos_token, which ends documents. Name one in its files."
            )
        self.directory = directory
        # Ids may have gaps: then there are fewer tokens than the highest id says.
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values())
        self.end_of_text = int(self._tokenizer.eos_token_id)
        self.identity = f"hf sha256:{_compute_digest(directory)}"

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the ids of each text without special tokens; half surrogate pairs become question marks."""
        return [
            np.asarray(ids, np.uint32) for ids in self._tokenize_without_special_tokens(texts)["input_ids"]
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids with special tokens and spaces as they are."""
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[Tokens, Offsets, Offsets]]:
        """Return the ids of each text, the character where each id begins, and the one behind its end."""
        encoded = self._tokenize_without_special_tokens(texts, return_offsets_mapping=True)
        return [
            (np.asarray(ids, np.uint32), *np.asarray(offsets, np.int64).reshape(-1, 2).T)
            for ids, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        ]

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens, and of those that were added as such."""
        added = self._tokenizer.added_tokens_decoder.items()
        return frozenset({*self._tokenizer.all_special_ids, *(id for id, token in added if token.special)})

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """The ids that the tokenizer puts before a text by default, as those of many base models do."""
        prefixed_ids, text = (
            self._tokenizer("a", add_special_tokens=special, verbose=False)["input_ids"]
            for special in (True, False)
        )
        return tuple(
            prefixed_ids[
                : next(at for at in range(len(prefixed_ids)) if prefixed_ids[at : at + len(text)] == text)
            ]
        )

    @property
    def has_chat_template(self) -> bool:
        """True if there is a chat template, usable or not."""
        return bool(self._tokenizer.chat_template)

    def read_chat_template(self) -> str:
        """Return the tokenizer's chat template. Raise UsageError where it has no usable one."""
        try:
            template: str = self._tokenizer.get_chat_template()
        except ValueError as error:
            raise UsageError(
                f"data.template: {self.directory} has no chat template ({error}). Set data.template: plain."
            ) from error
        return template

    def require_offsets(self) -> None:
        """Raise UsageError where the tokenizer does not tell at which character a token begins."""
        if not self._tokenizer.is_fast:
            raise UsageError(
                f"data.template: {self.directory} has no fast tokenizer (tokenizer.json), which gives the"
                " offsets of tokens. Set data.template: plain."
            )

    @property
    def template_variables(self) -> dict[str, Any]:
        """The special tokens by the names under which chat templates read them, such as bos_token."""
        return dict(self._tokenizer.special_tokens_map)

    def _tokenize_without_special_tokens(self, texts: Sequence[str], **options: Any) -> Any:
        valid_texts = [text.encode(errors="replace").decode() for text in texts]
        return self._tokenizer(valid_texts, add_special_tokens=False, verbose=False, **options)


def load_tokenizer(name: str, vocabulary: int) -> Tokenizer:
    """Return the tokenizer `bytes` or `hf:DIR`. Raise UsageError where it has more tokens than the model."""
    tokenizer: Tokenizer = (
        ByteTokenizer()
        if name == "bytes"
        else HuggingFaceTokenizer(Path(hub.build_cache_path_if_pinned(name.removeprefix("hf:"))))
    )
    if tokenizer.vocab_size > vocabulary:
        raise UsageError(
            f"data.tokenizer: {name} has ids up to {tokenizer.vocab_size - 1},"
            f" but the model's vocab_size is {vocabulary}. Name the model's tokenizer."
        )
    return tokenizer


def _find_damage(directory: Path) -> str:
    """Return which of a tokenizer's JSON files cannot be read; empty where all can."""
    for path in sorted(directory.glob("*.json")):
        try:
            files.read_json_object(path, limit=2**28)
        except UsageError as error:
            return str(error).replace(f"{directory}/", "")
    return ""


def _compute_digest(directory: Path) -> str:
    """Return the SHA-256 of the tokenizer's files, names included."""
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.is_file() and path.suffix in IDENTITY_FILE_SUFFIXES and path.name != "config.json":
            digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
