"""The section of a recipe that says what is trained on: files, the fields of their rows, images, videos."""

from typing import Annotated, Literal

from pydantic import Field

from bundle.recipe.chat_template import NAMES_WITHOUT_FILE as TEMPLATE_NAMES
from bundle.recipe.chat_template import NO_TEMPLATE, PLAIN_TEMPLATE
from bundle.recipe.section import AS_TUPLE, Count, Name, Names, Positive, Section, make_default_section

# 256 bytes, end of text, padding.
BYTE_VOCABULARY = 258


# Formats of rows with conversations; docs/data.md lists the fields of each.
RowFormat = Literal["openai", "prompt-response", "trl", "ms-swift", "sharegpt", "alpaca"]


class Fields(Section):
    """Names of the fields of a JSONL or parquet row.

    The fields of a row decide its format. docs/data.md lists the formats, their fields, and which parts of a
    row have a loss. If a row fits several formats, a format with a field that is renamed here is used.
    """

    format: RowFormat | None = Field(
        default=None,
        description="Format of all rows; null: found for each row by its fields. A row that fits two"
        " formats with different results is corrupt until this is set.",
    )
    text: str = Field(default="text", description="Pre-training: name of the field that holds the document.")
    prompt: str = Field(
        default="prompt",
        description="SFT, DPO: name of the field that holds the input of the model: a text or a list of"
        " messages.",
    )
    response: str = Field(
        default="response",
        description="SFT: name of the field that holds the expected answer: a text or a list of messages."
        " Only its tokens have a loss. TRL's name, `completion`, is also recognised.",
    )
    messages: str = Field(
        default="messages",
        description="SFT: name of the field that holds the messages: a list of {role, content}, or of"
        " ShareGPT's {from, value}. A message may have tool_calls, and a weight (0: not learned).",
    )
    chosen: str = Field(default="chosen", description="DPO: name of the field that holds the better answer.")
    rejected: str = Field(
        default="rejected", description="DPO: name of the field that holds the worse answer."
    )
    label: str | None = Field(
        default="label",
        description="SFT of KTO rows: name of the field that holds true for a good answer, false for a bad"
        " one (`kto_tag` is also recognised). Rows with false are corrupt, because they must not be learned."
        " null: not read.",
    )
    system: str | None = Field(
        default="system",
        description="SFT: name of the field that holds the system message, if a row has one; null: not read.",
    )
    tools: str | None = Field(
        default="tools",
        description="SFT: name of the field that holds the functions that the model may call, for the chat"
        " template: a list of JSON schemas, or such a list as JSON text; null: not read.",
    )
    images: str | None = Field(
        default="images",
        description="SFT, DPO: name of the field that holds the images of a row, one for each <image> or part"
        " of type image in its messages: paths below the rows' folder, file:// URLs of such paths, base64"
        " (data:image/png;base64,...) or, in parquet, bytes. The default also finds image, image_path and"
        " image_paths. null: images come only from parts that name them, and <image> is plain text.",
    )
    videos: str | None = Field(
        default="videos",
        description="SFT, DPO: name of the field that holds the videos of a row, one for each <video>. A"
        " video is a path, as for images,"
        " or a list of its frames. The default also finds video, video_path and video_paths.",
    )


class ImagesSection(Section):
    """How images of rows (JPEG, PNG and WebP) are read, for models with a vision tower."""

    min_pixels: Count | None = Field(
        default=None,
        description="Smallest size that an image is scaled to [pixels]; null: from processor_config.json"
        " or preprocessor_config.json of the model or its tokenizer, else transformers' default.",
    )
    max_pixels: Count | None = Field(
        default=None,
        description="Largest size that an image is scaled to [pixels]; null: from the same"
        " files as min_pixels.",
    )
    limit_bytes: Count = Field(
        default=2**25, description="A larger file, or base64 of more bytes, counts as corrupt."
    )
    limit_pixels: Count = Field(
        default=2**26,
        description="An image with more pixels counts as corrupt. Its size is read without decoding it.",
    )


class VideosSection(Section):
    """How videos of rows are read, for models with a vision tower: lists of frames, which are images;
    animated GIF, WebP and PNG; and, with the extra `video`, video files.

    If a video is a list of frames, all of them are used, and `fps` is the rate at which they were taken. The
    video's part of a message may have its own fps. From a video file, `fps` frames per second are sampled.
    The processor's do_sample_frames is ignored.
    """

    fps: Positive | None = Field(
        default=None,
        description="Frames per second; null: from processor_config.json, video_preprocessor_config.json"
        " or preprocessor_config.json of the model or its tokenizer, else 2.",
    )
    min_frames: Count | None = Field(
        default=None,
        description="Fewest frames to take from a file that has them; null: from the same files as fps,"
        " else 4.",
    )
    max_frames: Count | None = Field(
        default=None,
        description="Most frames to take from a file; null: from the same files as fps, else 768.",
    )
    min_pixels: Count | None = Field(
        default=None,
        description="Least pixels to which a frame is scaled; with Qwen3-VL, of all frames of a video"
        " together. null: from the same files as fps, else transformers' default.",
    )
    max_pixels: Count | None = Field(
        default=None,
        description="Most pixels to which a frame is scaled; null: from the same files as min_pixels.",
    )
    limit_bytes: Count = Field(
        default=2**29, description="A larger file, or a list of files of more bytes, counts as corrupt."
    )
    limit_pixels: Count = Field(
        default=2**24, description="A video with more pixels per frame counts as corrupt."
    )
    limit_frames: Count = Field(default=2**16, description="A video with more frames counts as corrupt.")
    limit_seconds: Positive = Field(default=3600.0, description="A longer video counts as corrupt.")


DataKind = Literal["text", "jsonl", "parquet", "arrow", "megatron"]


class ValidationSet(Section):
    """Evaluation data, read and tokenised like the training data; its loss is validation/NAME/loss."""

    path: Names = Field(min_length=1, description="As data.path.")
    source: DataKind | None = Field(default=None, description="Kind of the files; null: data.source.")


class Data(Section):
    """The training data."""

    source: DataKind | None = Field(
        default=None,
        description="Kind of the files; null: found by their name endings, which must agree. jsonl: an"
        " object per line or one array, also .gz and .zst; arrow: files of the `datasets` library;"
        " megatron: token ids as megatron-core's tools write them (.bin and .idx).",
    )
    path: Names = Field(
        min_length=1,
        description="Files, directories (also of `datasets`' save_to_disk), globs, or `stdlib`: the"
        " running Python's standard library; from the Hub: ORG/NAME, or"
        " hf://datasets/ORG/NAME@REVISION/PATH. megatron: the common prefix of the two files' names.",
    )
    weights: Annotated[tuple[Positive, ...], AS_TUPLE] | None = Field(
        default=None,
        min_length=1,
        description="Blend: every path is a data set, and has one weight, its share of the run, such as"
        " [0.7, 0.3]. Samples are drawn from the data sets by megatron-core's rule. Each data set is"
        " shuffled again in each of its epochs. null: one data set of all paths.",
    )
    separator: str | None = Field(
        default=None,
        min_length=1,
        description="text: separator of documents, such as a blank line; null: a file is a document.",
    )
    tokenizer: str = Field(
        pattern=r"^(bytes|hf:.+)$",
        default="bytes",
        description="`bytes` (256 byte values and 2 special tokens), or `hf:DIR`, a Hugging Face"
        " tokenizer: a directory, or ORG/NAME of the Hub. Default: the tokenizer in model.path, if any.",
    )
    sequence_length: Count = Field(
        description="Tokens of a sample; packed: tokens of a pack, which may exceed the model's positions,"
        " because each sequence has its own. DPO: tokens of a prompt with one answer; packed: tokens of a"
        " pack of pairs, of which a prompt with one answer may have half."
    )
    packed: bool = Field(
        default=False, description="Pack whole documents into each sample, without attention between them."
    )
    validation: float = Field(
        default=0.02,
        ge=0,
        lt=1,
        description="Share of the rows (pre-training: of pieces of text) held out for evaluation; 0: none.",
    )
    validation_sets: dict[Name, ValidationSet] = Field(
        default_factory=dict,
        description="Further data sets for evaluation, besides the held-out rows: a name, and its paths.",
    )
    cache: str | None = Field(
        default=None,
        min_length=1,
        description="Directory of token caches, which runs with the same data share; null: the folder .tokens"
        " next to the run directory; if that is not writable, the folder data in the run directory.",
    )
    on_error: Literal["stop", "skip"] = Field(
        default="stop",
        description="Corrupt rows and files: stop and list them, or skip and count them. A row that was"
        " skipped for its image stays skipped in `cache` until the file of the row changes.",
    )
    truncation: Literal["error", "delete", "right", "left"] = Field(
        default="error",
        description="What to do with a row longer than a sample. error: it counts as corrupt (see"
        " on_error); delete: leave it out; right, left: cut it on that side (SFT, DPO).",
    )
    fields: Fields = make_default_section("Names of the fields of a row.")
    images: ImagesSection = make_default_section("How images of rows are read.")
    videos: VideosSection = make_default_section("How videos of rows are read.")
    template: str = Field(
        default=PLAIN_TEMPLATE,
        min_length=1,
        description="SFT, DPO, RL: `plain`: roles as headings; `none`: only the texts; `chat`: the"
        " tokenizer's chat template; `chatml`: ChatML; or FILE.jinja, whose text becomes part of the job and"
        " is exported with the tokenizer. Default: chat if the tokenizer has a template, otherwise plain.",
    )
    date: str | None = Field(
        default=None,
        pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$",
        description="Date (YYYY-MM-DD) that a chat template writes as today's date. A template that writes"
        " one needs it.",
    )
    template_arguments: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description="Variables for the chat template, such as enable_thinking: false.",
    )
    learn: Literal["all_turns", "last_turn"] = Field(
        default="all_turns",
        description="SFT: learn the assistant's text in every turn, or only in the last. If a chat"
        " template rewrites earlier turns, such as without reasoning, a row becomes a sample for each turn.",
    )

    @property
    def has_template(self) -> bool:
        """True if a chat template writes the rows."""
        return self.template not in (PLAIN_TEMPLATE, NO_TEMPLATE)

    @property
    def custom_template_text(self) -> str | None:
        """The chat template that replaces the tokenizer's; None where none does."""
        return None if self.template in TEMPLATE_NAMES else self.template

    @property
    def training_set_paths(self) -> list[tuple[str, ...]]:
        """The paths of each data set; in a blend every path is a data set."""
        return [(path,) for path in self.path] if self.weights else [self.path]
