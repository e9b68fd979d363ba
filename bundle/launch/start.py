"""How a job begins: with what its run directory holds, with a checkpoint that somebody names, or anew."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bundle.errors import UsageError

Text = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]


class Start(BaseModel):
    """What to do with what the run directory holds, and the checkpoint or run that a new run begins with.

    Of that checkpoint all is taken, which needs the data that it was trained on, or its weights alone.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    fresh: bool = False
    resume: bool = False
    origin: Text | None = None
    weights_only: bool = False

    @model_validator(mode="after")
    def _names_a_checkpoint(self) -> Self:
        if self.weights_only and self.origin is None:
            raise UsageError("--weights-only takes the weights of a checkpoint: name that with --from")
        return self

    @property
    def checkpoint(self) -> Path | None:
        """`origin` as a path."""
        return None if self.origin is None else Path(self.origin)
