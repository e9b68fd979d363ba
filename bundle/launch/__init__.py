"""The start of a job: who started this process, the start of a node's ranks, and the verdict on their end."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from bundle.errors import UsageError

LOCK_FILE = ".lock"  # in the run directory; the launcher of rank 0 and rank 0 hold it


def _refuse_null_character(path: Path) -> Path:
    if "\0" in str(path):
        raise ValueError("not a valid file name: it contains a null character")
    return path


FilePath = Annotated[Path, AfterValidator(_refuse_null_character)]


class Start(BaseModel):
    """The use of a run directory's content, and the checkpoint or run that a new run begins with.

    A new run takes everything in that checkpoint, which needs the data that it was trained on, or its weights
    alone.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)

    fresh: bool = False
    resume: bool = False
    origin: FilePath | None = None
    weights_only: bool = False

    @model_validator(mode="after")
    def _require_origin_for_weights(self) -> Self:
        if self.weights_only and self.origin is None:
            raise UsageError("--weights-only: no checkpoint is named. Name one with --from")
        return self
