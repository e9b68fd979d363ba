"""`mcore-bundle generate` with images and videos: what transformers answers to the same inputs."""

import json
import shutil

import pytest
import torch

from bundle.data.media import Medium
from bundle.data.processing import MediaProcessor
from bundle.data.prompts import PromptBuilder
from bundle.errors import UsageError
from tests.cli.test_generate import generate
from tests.vision import clips, reference
from tests.vision.cases import Case
from tests.vision.rows import content, image

ASKED, TOKENS = "look:<video>and<image>", 5
pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture(scope="module", params=clips.FAMILIES[:2])
def model(request, tmp_path_factory):
    """A directory with a model of random weights, a tokenizer and processors, and files beside it."""
    transformers = pytest.importorskip("transformers")
    directory = clips.written(tmp_path_factory.mktemp("asked") / "clips", ("file of 11", "file of 4"))
    torch.manual_seed(3)
    made = transformers.AutoModelForImageTextToText.from_config(
        reference._config(Case("", clips.config(request.param))), dtype=torch.float32
    )
    for parameter in made.parameters():
        parameter.data.normal_(0 if parameter.ndim > 1 else 1, 0.4)
    made.save_pretrained(directory / "tokenizer")
    return request.param, directory, made.eval()


def wanted(family, directory):
    """What transformers' model answers to the ids that its processor makes."""
    known = json.loads(clips.KEPT.read_text())[f"{family}, file of 11"]["ids"]
    assistant = next(at for at in reversed(range(len(known))) if known[at] == 256)
    ids = known[: assistant + len("assistant\n") + 1]
    processing = MediaProcessor.from_recipe(clips.job(directory, family))
    assert processing is not None
    video, still = (
        processing.read_bytes_and_grid(Medium(kind, f"images/{name}"), directory)
        for kind, name in (("video", "file of 11.webp"), ("image", "still.png"))
    )
    return ids, [video, still], [torch.from_numpy(processing.extract_patches(of)) for of in (video, still)]


def answer(made, ids, pictures, patches):
    (video, still), shown = pictures, torch.tensor([ids])
    given = {
        "pixel_values_videos": patches[0],
        "video_grid_thw": torch.tensor([video.grid]),
        "pixel_values": patches[1],
        "image_grid_thw": torch.tensor([still.grid]),
        "mm_token_type_ids": (shown == 259).int() + 2 * (shown == 261).int(),
    }
    if made.config.model_type == "qwen2_5_vl":
        given["second_per_grid_ts"] = torch.tensor([video.seconds])
    with torch.no_grad():
        found = made.generate(shown, **given, max_new_tokens=TOKENS, do_sample=False, eos_token_id=257)
    return found[0, len(ids) :].tolist()


def test_an_answer_is_that_of_transformers_to_its_own_inputs(model, capfd):
    family, directory, made = model
    ids, pictures, patches = wanted(family, directory)
    prompts = PromptBuilder.from_directory(directory / "tokenizer")
    files = {
        "video": [directory / "images" / "file of 11.webp"],
        "image": [directory / "images" / "still.png"],
    }
    asked = prompts.build_prompt(ASKED, files)
    assert asked.ids == ids and asked.visual_inputs is not None
    assert torch.equal(asked.visual_inputs.patches, torch.cat(patches))
    said = prompts.tokenizer.decode(answer(made, ids, pictures, patches))
    words = ["--video", *files["video"], "--image", *files["image"], "--max-tokens", TOKENS]
    code, out, err = generate(capfd, directory / "tokenizer", "--prompt", ASKED, *words, "--json")
    assert code == 0, err
    assert json.loads(out)["answer"] == said
    # Another picture is another answer.
    other = [torch.zeros_like(patches[0]), patches[1] * 3]
    assert prompts.tokenizer.decode(answer(made, ids, pictures, other)) != said


def test_what_is_shown_stands_before_a_prompt_without_marks(model, tmp_path):
    _, directory, _ = model
    (tmp_path / "a.png").write_bytes(content(image(16, 16)))
    (tmp_path / "b.png").symlink_to(tmp_path / "a.png")
    prompts = PromptBuilder.from_directory(directory / "tokenizer")
    files = {
        "image": [tmp_path / "a.png", tmp_path / "b.png"],
        "video": [directory / "images" / "file of 4.webp"],
    }
    plain, before, around = (
        prompts.build_prompt(text, files).ids
        for text in ("which?", "<image><image><video>which?", "<video><image>which?<image>")
    )
    assert plain == before != around
    assert prompts.build_prompt("is <image> a mark?", {"image": [], "video": []}).visual_inputs is None
    for text, shown, why in (
        ("<image>?", files, "--image"),
        ("?", {"image": [tmp_path / "none.png"]}, "No such file"),
        ("?", {"video": [tmp_path / "a.png"]}, "durations"),
    ):
        with pytest.raises(UsageError, match=why):
            prompts.build_prompt(text, shown)


def test_a_model_of_text_is_shown_nothing(model, tmp_path, messages):
    _, directory, _ = model
    shutil.copytree(
        directory / "tokenizer", tmp_path / "text", ignore=shutil.ignore_patterns("*.safetensors")
    )
    text = {"model_type": "qwen2", "vocab_size": 264, "hidden_size": 64, "intermediate_size": 64}
    text |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "text" / "config.json").write_text(json.dumps(text | {"max_position_embeddings": 64}))
    prompts = PromptBuilder.from_directory(tmp_path / "text")
    with pytest.raises(UsageError, match="images") as error:
        prompts.build_prompt("?", {"image": [directory / "images" / "still.png"]})
    messages(error.value)
    (tmp_path / "text" / "chat_template.jinja").unlink()
    with pytest.raises(UsageError, match="chat template") as error:
        PromptBuilder.from_directory(tmp_path / "text").build_prompt(
            "?", {"image": [directory / "images" / "still.png"]}
        )
    messages(error.value)
