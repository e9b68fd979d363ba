"""The section of a recipe that says what is trained on: files, the fields of their rows, images, videos."""

from typing import Annotated, Literal

from pydantic import Field

from bundle.recipe.chat_template import NAMES as TEMPLATE_NAMES
from bundle.recipe.chat_template import NO_TEMPLATE, PLAIN_TEMPLATE
from bundle.recipe.section import AS_TUPLE, Count, Name, Names, Positive, Section, make_default_section

# 256 bytes, end of text, padding.
BYTE_VOCABULARY = 258


# Formats of rows with conversations; docs/data.md lists the fields of each.
RowFormat = Literal["openai", "prompt-response", "trl", "ms-swift", "sharegpt", "alpaca"]


class Fields(Section):
    """Names of the fields of a JSONL or parquet row.

    The format of a row is found by the fields that it has: docs/data.md lists the formats, their fields and
    what is learned of each. A format comes first if a field of it is named here otherwise than by default.
    """

    format: RowFormat | None = Field(
        default=None,
        description="The format of all rows; null: of each row, by its fields. A row that two formats read"
        " differently is corrupt until this names one.",
    )
    text: str = Field(default="text", description="Pre-training: the document.")
    prompt: str = Field(
        default="prompt", description="SFT, DPO: what the model is given, a text or a list of messages."
    )
    response: str = Field(
        default="response",
        description="SFT: what it should answer, a text or messages; only this has a loss. TRL's name,"
        " `completion`, is found as well.",
    )
    messages: str = Field(
        default="messages",
        description="SFT: a list of {role, content}, or of ShareGPT's {from, value}; a message may have"
        " tool_calls, and a weight (0: not learned).",
    )
    chosen: str = Field(default="chosen", description="DPO: the better answer.")
    rejected: str = Field(default="rejected", description="DPO: the worse answer.")
    label: str | None = Field(
        default="label",
        description="SFT of KTO rows: whether the answer is a good one (true or false; `kto_tag` is found as"
        " well). Rows with false are corrupt, since they are not to be learned. null: not read.",
    )
    system: str | None = Field(
        default="system", description="SFT: the system message, where a row has one; null: none is read."
    )
    tools: str | None = Field(
        default="tools",
        description="SFT: functions that may be called, for the chat template, where a row has any: a list of"
        " JSON schemas, or JSON of one; null: none are read.",
    )
    images: str | None = Field(
        default="images",
        description="SFT, DPO: the images of a row, one for each place in its messages (<image>, or a part of"
        " type image): paths below the rows' folder, file:// URLs of such, base64 (data:image/png;base64,...)"
        " or, in parquet, bytes. The default also finds them under image, image_path and image_paths. null:"
        " only parts that name theirs, and <image> is plain text.",
    )
    videos: str | None = Field(
        default="videos",
        description="The same for videos (<video>): each as an image is named, or a list of its frames. The"
        " default also finds them under video, video_path and video_paths.",
    )


class ImagesSection(Section):
    """How images of rows are read, for a model that sees some: JPEG, PNG and WebP."""

    min_pixels: Count | None = Field(
        default=None,
        description="An image is made at least so large [pixels]; null: what processor_config.json or"
        " preprocessor_config.json of the model or its tokenizer says, or else transformers' class.",
    )
    max_pixels: Count | None = Field(
        default=None, description="And at most so large [pixels]; null: as with min_pixels."
    )
    limit_bytes: Count = Field(
        default=2**25, description="A larger file, or base64 of more bytes, is corrupt."
    )
    limit_pixels: Count = Field(
        default=2**26, description="An image of more pixels is corrupt; none is decoded to find out."
    )


class VideosSection(Section):
    """How videos of rows are read, for a model that sees some: lists of frames, which are images; animated
    GIF, WebP and PNG; and, with the extra `video`, films.

    A list is taken whole, as `fps` frames a second, unless its part of a message says an fps. Of a file `fps`
    frames a second are taken, whatever its processor says of do_sample_frames.
    """

    fps: Positive | None = Field(
        default=None,
        description="Frames a second; null: what processor_config.json, video_preprocessor_config.json or"
        " preprocessor_config.json of the model or its tokenizer says, or else 2.",
    )
    min_frames: Count | None = Field(
        default=None,
        description="Of a file at least so many frames are taken, if it has them; null: what these files"
        " say, or else 4.",
    )
    max_frames: Count | None = Field(
        default=None, description="And at most so many; null: what these files say, or else 768."
    )
    min_pixels: Count | None = Field(
        default=None,
        description="A frame is made at least so large [pixels], with Qwen3-VL all of them together; null: as"
        " with data.images.",
    )
    max_pixels: Count | None = Field(
        default=None, description="And at most so large [pixels]; null: as with min_pixels."
    )
    limit_bytes: Count = Field(
        default=2**29, description="A larger file, or a list of larger ones together, is corrupt."
    )
    limit_pixels: Count = Field(default=2**24, description="A video of more pixels in a frame is corrupt.")
    limit_frames: Count = Field(default=2**16, description="A video of more frames is corrupt.")
    limit_seconds: Positive = Field(default=3600.0, description="A longer video is corrupt.")


DataKind = Literal["text", "jsonl", "parquet", "arrow", "megatron"]


class ValidationSet(Section):
    """Data to evaluate with, read and tokenised as what is trained on; its loss is validation/NAME/loss."""

    path: Names = Field(min_length=1, description="As data.path.")
    source: DataKind | None = Field(default=None, description="Kind of the files; null: data.source.")


class Data(Section):
    """What is trained on."""

    source: DataKind | None = Field(
        default=None,
        description="Kind of the files; null: by the ends of their names, all of them of one kind. jsonl: an"
        " object a line or one array, .gz and .zst too; arrow: of `datasets`; megatron: ids as its own"
        " tools write them (.bin and .idx).",
    )
    path: Names = Field(
        min_length=1,
        description="Files, directories (those of `datasets`' save_to_disk too), globs, or `stdlib`: the"
        " running Python's standard library; of the Hub: ORG/NAME, or"
        " hf://datasets/ORG/NAME@REVISION/PATH. megatron: what both files' names begin with.",
    )
    weights: Annotated[tuple[Positive, ...], AS_TUPLE] | None = Field(
        default=None,
        min_length=1,
        description="Blend: every path is a data set of its own, and this is how much of a run each is, such"
        " as [0.7, 0.3]; drawn by megatron-core's rule, each set shuffled anew for each of its epochs. null:"
        " one data set of all paths.",
    )
    separator: str | None = Field(
        default=None,
        min_length=1,
        description="text: divides a file into documents, such as a blank line; null: a file is a document.",
    )
    tokenizer: str = Field(
        pattern=r"^(bytes|hf:.+)$",
        default="bytes",
        description="`bytes` (256 and two specials), or `hf:DIR`, a Hugging Face tokenizer: a directory,"
        " or ORG/NAME of the Hub. Left out: that of model.path, if there is one.",
    )
    sequence_length: Count = Field(
        description="Tokens of a sample; packed: tokens of a pack, which may be more than the model has"
        " positions: each sequence has its own. DPO: of an answer with its prompt; packed: of a pack, which"
        " holds whole pairs, so that an answer may have half as many."
    )
    packed: bool = Field(
        default=False, description="Pack whole documents into each sample, without attention across."
    )
    validation: float = Field(
        default=0.02,
        ge=0,
        lt=1,
        description="Share of the rows (pre-training: of pieces of text) held out for evaluation; 0: none.",
    )
    validation_sets: dict[Name, ValidationSet] = Field(
        default_factory=dict,
        description="Data of its own to evaluate with, besides what is held out: a name, and its paths.",
    )
    cache: str | None = Field(
        default=None,
        min_length=1,
        description="Directory of tokens, for all runs that have the same data; null: .tokens beside the run"
        " directory, or data in it where that cannot be written.",
    )
    on_error: Literal["stop", "skip"] = Field(
        default="stop",
        description="Corrupt rows and files: stop and list them, or skip and count them. A row that was"
        " skipped for an image stays so in `cache` until the row's own file changes.",
    )
    truncation: Literal["error", "delete", "right", "left"] = Field(
        default="error",
        description="SFT, DPO: rows of more tokens than a sample: corrupt, left out, or cut on that side.",
    )
    fields: Fields = make_default_section("Names of the fields of a row.")
    images: ImagesSection = make_default_section("How images of rows are read.")
    videos: VideosSection = make_default_section("How videos of rows are read.")
    template: str = Field(
        default=PLAIN_TEMPLATE,
        min_length=1,
        description="SFT, DPO, RL: `plain`, roles as headings; `none`, the texts alone; `chat`, the"
        " tokenizer's chat template; `chatml`; or FILE.jinja, whose text stands in the job for the file and"
        " is exported with the tokenizer."
        " Left out: chat, if the tokenizer has a template.",
    )
    date: str | None = Field(
        default=None,
        pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$",
        description="What a chat template that writes today's date is told (YYYY-MM-DD), on whatever day.",
    )
    template_arguments: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description="Variables for the chat template, such as enable_thinking: false.",
    )
    learn: Literal["all_turns", "last_turn"] = Field(
        default="all_turns",
        description="SFT: learn what the assistant says in every turn, or in the last one only. Where a chat"
        " template rewrites earlier turns, such as without thoughts, a row becomes a sample for each turn.",
    )

    @property
    def has_template(self) -> bool:
        """True if a chat template writes the rows."""
        return self.template not in (PLAIN_TEMPLATE, NO_TEMPLATE)

    @property
    def template_text(self) -> str | None:
        """The chat template that replaces the tokenizer's; None where none does."""
        return None if self.template in TEMPLATE_NAMES else self.template

    @property
    def data_sets(self) -> list[tuple[str, ...]]:
        """The paths of each data set; in a blend every path is a data set."""
        return [(path,) for path in self.path] if self.weights else [self.path]
