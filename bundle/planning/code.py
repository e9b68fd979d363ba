"""What sizes and limits depend on in megatron-core's code: read where there is a tree, else by its number."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from packaging.version import Version

from bundle import files


class SourcePredicate(NamedTuple):
    """A text in a file below megatron/core that tells a behaviour, and the release that it came with."""

    file: str
    text: str
    since: str


# The gate of experts is computed with glu_linear_offset, zero or not.
SHIFTED_GATE = SourcePredicate("transformer/mlp.py", "glu_linear_offset", "0.15")
# Experts whose tensor parallel size is not the dense one get the experts' groups even at ep 1; before, their
# gradients are reduced like dense ones.
EXPERT_GROUPS_BY_ETP = SourcePredicate("tensor_parallel/layers.py", "use_expert_pgs", "0.19")
# Modules that discard their output ask a name of Transformer Engine whether there is FP8.
DISCARD_ASKS_FP8 = SourcePredicate("tensor_parallel/random.py", "FP8GlobalStateManager", "0.13")
SHARED_EXPERTS_AGAIN = SourcePredicate("transformer/transformer_config.py", '"shared_experts"', "0.14")


@dataclass(frozen=True, slots=True)
class MegatronCode:
    """The code of one megatron-core: its release number, and the directory that holds `megatron`, if any."""

    release: Version
    root: Path | None = None
    _texts: dict[str, str | None] = field(default_factory=dict, compare=False, repr=False)

    def has(self, predicate: SourcePredicate) -> bool:
        """Whether this megatron-core behaves as the predicate tells."""
        found = self._text(predicate.file)
        return self.release >= Version(predicate.since) if found is None else predicate.text in found

    def said_by(self, predicate: SourcePredicate) -> str:
        """What `has` was decided by, for people."""
        found = self._text(predicate.file)
        return f"by the number {self.release} alone" if found is None else f"read in {predicate.file}"

    def _text(self, file: str) -> str | None:
        """A file's text; None where there is no tree, or no such file in it."""
        if self.root is not None and file not in self._texts:
            self._texts[file] = files.read(self.root / "megatron/core" / file)
        return self._texts.get(file)
