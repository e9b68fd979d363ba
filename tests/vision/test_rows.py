"""Rows with images: patches as transformers makes them, what is learned of each, what is refused by name."""

import base64
import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from bundle.architectures.multimodal import FAMILIES as IMAGE_FAMILIES
from bundle.data import prepare
from bundle.data.media import Picture, RowColumn, pop_media
from bundle.data.processing import MediaProcessor
from bundle.data.sources import CorruptData
from bundle.data.tokenizers import HuggingFaceTokenizer
from bundle.errors import UsageError
from bundle.recipe import from_mapping, load
from tests.vision import rows
from tests.vision.cases import CASES
from tests.vision.rows import asking, content, image

pytestmark = pytest.mark.filterwarnings("ignore")
PLAIN = content(image(16, 16))


def showing(reference):
    return asking("<image>?", images=[reference])


@pytest.fixture(autouse=True, scope="module")
def _transformers():
    pytest.importorskip("transformers")


def job(directory, *more):
    return load(str(rows.RECIPE), rows.overrides(directory, *more))


def processing(tmp_path, *more):
    found = MediaProcessor.from_recipe(job(rows.write(tmp_path / "of", [], {}), *more))
    assert found is not None
    return found.images


def corpus(directory, *more):
    return prepare(job(directory, *more), directory / "cache")


@pytest.mark.parametrize("size", [(16, 16), (40, 23), (9, 31), (200, 3), (7, 7), (64, 64)])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_patches_are_those_of_transformers(tmp_path, size, mode):
    kind = pytest.importorskip(
        "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
    ).Qwen2VLImageProcessorPil
    of = image(size[0], size[1], mode=mode)
    limits = {"min_pixels": 400, "max_pixels": 1500}
    ours = processing(tmp_path, *(f"data.images.{name}={value}" for name, value in limits.items()))
    known = {n: v for n, v in rows.digits.PROCESSING.items() if n not in ("image_processor_type", *limits)}
    theirs = kind(**known, **limits)(images=[of.convert("RGB")], return_tensors="np")
    picture = ours.read_bytes_and_grid(content(of), tmp_path)
    assert [list(picture.grid)] == theirs["image_grid_thw"].tolist()
    assert np.abs(ours.extract_patches(*picture.contents) - theirs["pixel_values"]).max() < 1e-6


def test_an_image_is_read_upright(tmp_path):
    ours, of = processing(tmp_path), image(16, 16)
    exif = of.getexif()
    exif[0x112] = 6  # to be turned by a quarter
    turned = content(of.rotate(90), exif=exif)
    assert np.array_equal(ours.extract_patches(turned), ours.extract_patches(content(of)))


def test_what_is_learned_and_shown_at_every_token(tmp_path):
    wide = content(image(16, 32, seed=2))
    named = [{"type": "image", "image": "images/b.png"}, {"type": "text", "text": " or "}, {"type": "image"}]
    given = [
        asking("<image>what?<image>", "two", images=["images/a.png", "images/b.png"]),
        asking("no image", "none"),
        asking(named, "both", images=["images/a.png"]),
    ]
    directory = rows.write(tmp_path / "data", given, {"images/a.png": PLAIN, "images/b.png": wide})
    made = corpus(directory, "data.sequence_length=96", "data.images.max_pixels=512")
    (store,), tokenizer = made.stores, HuggingFaceTokenizer(directory / "tokenizer")
    seen = []
    for start, length in zip(store.document_starts, store.lengths, strict=True):
        ids, learned = (of[start : start + length] for of in (store.ids, store.loss_mask))
        text = "".join(
            f"[{tokenizer.decode([int(each)])}]" if is_learned else tokenizer.decode([int(each)])
            for each, is_learned in zip(ids, learned, strict=True)
        )
        seen.append(text.replace("<|im_start|>", "^").replace("<|image_pad|>", "#"))
    show = {4: "<|vision_start|>####<|vision_end|>", 8: "<|vision_start|>########<|vision_end|>"}
    end, learned_end = "<|im_end|>\n", "[<|im_end|>][\n]"
    said = ["[t][w][o]", "[n][o][n][e]", "[b][o][t][h]"]
    asked = [f"{show[4]}what?{show[8]}", "no image", f"{show[8]} or {show[4]}"]
    assert seen == [
        f"^user\n{question}{end}^assistant\n{answer}{learned_end}"
        for question, answer in zip(asked, said, strict=True)
    ]
    assert store.pictures.counts.tolist() == [2, 0, 2]
    assert store.pictures.grids.tolist() == [[1, 4, 4], [1, 4, 8], [1, 4, 8], [1, 4, 4]]
    batch = made.training.build_batch(np.asarray([2, 0]))
    ours = processing(tmp_path, "data.images.max_pixels=512")
    wanted = [ours.extract_patches(of) for of in (wide, PLAIN, PLAIN, wide)]
    assert np.array_equal(batch.pixels.numpy(), np.concatenate(wanted))
    assert batch.grids.tolist() == [[1, 4, 8], [1, 4, 4], [1, 4, 4], [1, 4, 8]]
    assert batch.ids.eq(259).sum(1).tolist() == [12, 12]
    alone = made.training.build_batch(np.asarray([1, -1]))
    assert alone.grids.tolist() == [[1, 4, 4], [1, 4, 8]]  # a blank sample is the first one without loss
    assert not alone.loss_mask[1].any() and alone.loss_mask[0].sum() == 6


def test_packs_have_the_images_of_their_sequences(tmp_path):
    other = content(image(16, 16, seed=3))
    given = [
        showing("images/a.png"),
        asking("?"),
        asking("<image>", images=["images/b.png"]),
    ]
    directory = rows.write(tmp_path / "data", given, {"images/a.png": PLAIN, "images/b.png": other})
    packed = ["data.packed=true", "data.sequence_length=128", "train.micro_batch_size=1"]
    batch = corpus(directory, *packed).training.build_batch(np.asarray([0]))
    ours = processing(tmp_path)
    assert len(batch.lengths) == 3 and batch.grids.shape == (2, 3)
    first, second = batch.pixels.numpy().reshape(2, 16, -1)
    order = sorted([first, second], key=lambda of: not np.array_equal(of, ours.extract_patches(PLAIN)))
    assert np.array_equal(order[0], ours.extract_patches(PLAIN)) and np.array_equal(
        order[1], ours.extract_patches(other)
    )


CODED = base64.b64encode(PLAIN).decode()
NAMED = [
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{CODED}"}},
    {"type": "image_url", "image_url": f"data:image/png;base64,{CODED}"},
    {"type": "image", "base64": CODED},
    {"type": "image", "path": "images/a.png"},
    {"type": "image", "image": "images/a.png"},
    {"type": "image", "url": f"data:image/jpeg;base64,{CODED}"},
]


@pytest.mark.parametrize("part", NAMED)
def test_ways_to_name_an_image(tmp_path, part):
    directory = rows.write(tmp_path / "data", [asking([part])], {"images/a.png": PLAIN})
    (store,) = corpus(directory).stores
    assert store.pictures.read_encoded_picture(0).contents == (PLAIN,)


def test_rows_of_llava_have_their_images(tmp_path):
    said = [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "a cat"}]
    row = {"id": "000000033471", "image": "images/a.png", "conversations": said}
    directory = rows.write(tmp_path / "data", [row], {"images/a.png": PLAIN})
    (store,) = corpus(directory).stores
    assert store.pictures.read_encoded_picture(0).contents == (PLAIN,)
    assert np.count_nonzero(store.ids == 259) == 4, "tokens of one image, and no text <image>"


@pytest.mark.parametrize("key", ["images", "image"])
def test_parquet_holds_bytes(tmp_path, key):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    row = asking("<image>?", **{key: [{"bytes": PLAIN, "path": None}]})
    directory = rows.write(tmp_path / "data", [], {})
    parquet.write_table(pyarrow.Table.from_pylist([row]), directory / "rows.parquet")
    given = f"data.path=[{directory / 'rows.parquet'}]"
    (store,) = corpus(directory, "data.source=parquet", given).stores
    assert store.pictures.read_encoded_picture(0).contents == (PLAIN,)


HUGE = content(image(300, 300))
BROKEN = [
    ("https://example.com/a.png", "is a URL"),
    ("file:///etc/passwd", "outside of the folder"),
    ("../outside.png", "outside of the folder"),
    ("/etc/passwd", "outside of the folder"),
    ("images/link.png", "outside of the folder"),
    ("images/none.png", "No such file"),
    ("images", "Is a directory"),
    ("images/\0.png", "embedded null byte"),
    ("images/pipe", "a pipe or a device"),
    ("images/cut.png", "JPEG, PNG or WEBP"),
    ("images/text.png", "JPEG, PNG or WEBP"),
    ("images/round", "image "),
    ("images/a.gif", "JPEG, PNG or WEBP"),
    ("images/huge.png", "exceeds data.images.limit_pixels"),
    ("images/long.png", "one side is over 200 times the other"),
    ("data:image/png;base64,####", "not in base64"),
    ({"nothing": 1}, "must be a path, base64 or bytes"),
    (7, "must be a path, base64 or bytes"),
]


@pytest.mark.parametrize(("reference", "why"), BROKEN)
def test_a_broken_image_is_named_or_skipped(tmp_path, reference, why):
    import os

    images = {"images/a.png": PLAIN, "images/cut.png": PLAIN[:200], "images/text.png": b"text"}
    images |= {"images/a.gif": content(image(16, 16), "GIF"), "images/huge.png": HUGE}
    images |= {"images/long.png": content(image(1, 300))}
    given = [showing("images/a.png"), showing(reference)]
    directory = rows.write(tmp_path / "data", given, images)
    (tmp_path / "outside.png").write_bytes(PLAIN)
    (directory / "images" / "link.png").symlink_to(tmp_path / "outside.png")
    (directory / "images" / "round").symlink_to("round")
    os.mkfifo(directory / "images" / "pipe")
    limited = "data.images.limit_pixels=10000"
    with pytest.raises(UsageError) as failed:
        corpus(directory, limited)
    assert why in str(failed.value) + str(failed.value.violations) and "rows.jsonl:2" in str(
        failed.value.violations
    )
    made = corpus(directory, limited, "data.on_error=skip")
    assert (made.left_out.skipped, len(made.training)) == (1, 1)
    assert why in made.left_out.skipped_rows[0] and "BytesIO" not in made.left_out.skipped_rows[0]


def test_a_broken_image_is_told_by_its_name_and_many_of_them_by_their_cause(tmp_path, messages):
    broken = {f"images/{letter}.png": b"text" for letter in "abcdef"}
    directory = rows.write(tmp_path / "data", [showing(name) for name in broken], broken)
    with pytest.raises(UsageError) as failed:
        corpus(directory)
    (line,) = failed.value.violations
    assert "rows.jsonl:3" in line and "3 more" in line and "'images/a.png'" in line
    messages(line)


def test_a_file_larger_than_the_limit_is_not_read(tmp_path):
    given = [showing("images/a.png")]
    directory = rows.write(tmp_path / "data", given, {"images/a.png": PLAIN})
    with pytest.raises(UsageError) as failed:
        corpus(directory, f"data.images.limit_bytes={len(PLAIN) - 1}")
    assert "larger than" in str(failed.value.violations)


@pytest.mark.parametrize(
    ("row", "value"),
    [
        (asking("<image><image>?", images=["images/a.png"]), "names 1"),
        (asking("<image>?", images=["images/a.png"] * 3), "names 3"),
        (asking("?", images=["images/a.png"]), "names 1"),
        (asking("<|image_pad|>?"), "0 images"),
        (asking([{"type": "audio", "audio": "a.wav"}]), "audio"),
        (asking("?", audios=["a.wav"]), "audios"),
        (asking("?", [{"type": "image", "image": "images/a.png"}]), "assistant"),
        (asking([{"type": "image", "image": "a", "path": "b"}]), "an image"),
    ],
)
def test_rows_whose_images_have_no_place_are_named(tmp_path, row, value, messages):
    directory = rows.write(tmp_path / "data", [row], {"images/a.png": PLAIN})
    with pytest.raises(UsageError) as failed:
        corpus(directory)
    (line,) = failed.value.violations
    assert value in line
    messages(line)


@pytest.mark.parametrize(
    ("row", "value"),
    [
        (showing("images/a.png"), "has images"),
        (asking("<image>?", image="images/a.png"), "has images"),
        (asking("<image>?"), "names 0"),
    ],
)
def test_a_model_of_text_is_given_no_images(tmp_path, row, value, messages):
    directory = rows.write(tmp_path / "d", [row], {"images/a.png": PLAIN})
    text = {"model_type": "qwen2", "vocab_size": 264, "hidden_size": 64, "intermediate_size": 64}
    text |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {**text, "max_position_embeddings": 128}
    recipe = from_mapping(job(directory).dump() | {"model": {"config": config}})
    with pytest.raises(UsageError) as failed:
        prepare(recipe, directory / "cache")
    (line,) = failed.value.violations
    assert value in line and "rows.jsonl:1" in line
    messages(line)


@pytest.mark.parametrize("cut", ["right", "left", "delete"])
def test_images_are_not_cut(tmp_path, cut, messages):
    given = [asking("<image>" + "?" * 60, images=["images/a.png"]), asking("?")]
    directory = rows.write(tmp_path / "data", given, {"images/a.png": PLAIN})
    made = corpus(directory, f"data.truncation={cut}", "data.sequence_length=48")
    assert (made.left_out.deleted, made.left_out.cut, len(made.training)) == (1, 0, 1)
    assert ("not cut" in made.left_out.long_rows[0]) == (cut != "delete")
    messages(made.left_out.long_rows[0])


def test_settings_of_an_image_processor(tmp_path, messages):
    directory = rows.write(tmp_path / "data", [], {})
    settings = directory / "tokenizer" / "preprocessor_config.json"
    assert processing(tmp_path).mean == (0.5, 0.5, 0.5)
    # What is said of all processors together goes before the image processor's own file.
    nested = (
        '{"image_processor": {"size": {"shortest_edge": 64, "longest_edge": 4096}, "image_std": [1, 2, 3]}}'
    )
    settings.with_name("processor_config.json").write_text(nested)
    found = MediaProcessor.from_recipe(job(directory))
    assert found and (found.images.min_pixels, found.images.max_pixels) == (64, 4096)
    assert found.images.std == (1, 2, 3)
    with pytest.raises(UsageError, match=r"5000.*4096") as error:
        MediaProcessor.from_recipe(job(directory, "data.images.min_pixels=5000"))
    messages(error.value)
    for wrong, value in (("[1]", "processor_config"), ('{"image_processor": 3}', "image_processor")):
        settings.with_name("processor_config.json").write_text(wrong)
        with pytest.raises(UsageError, match=value) as error:
            MediaProcessor.from_recipe(job(directory))
        messages(error.value)
    settings.with_name("processor_config.json").write_text('{"processor_class": "Qwen2_5_VLProcessor"}')
    found = MediaProcessor.from_recipe(job(directory))
    assert found and (found.images.min_pixels, found.images.std) == (256, (0.5, 0.5, 0.5))


UNFIT = [
    *product(["min_pixels", "max_pixels"], ["64", 1.5, 0, -1, True, [], 2**40]),
    ("size", 5),
    *product(["size"], [{"shortest_edge": "64"}, {"longest_edge": 0.5}]),
    *product(["image_mean"], [5, "abc", [0.5], [0.5] * 4, [math.nan] * 3, [10**400] * 3, ["a", 1, 1]]),
    *product(["image_std"], [0, [0, 0, 0], [1, 1, -1], [1, math.inf, 1], ["a", 1, 1], [True] * 3]),
    *product(["fps"], ["2", 0, math.inf, [], True]),
    *product(["min_frames", "max_frames"], ["2", 0, 2.0, True]),
]


@pytest.mark.parametrize("of", ["preprocessor_config", "video_preprocessor_config"])
@pytest.mark.parametrize(("name", "value"), UNFIT)
def test_a_value_that_cannot_be_one_of_a_processor_is_refused_by_name(tmp_path, of, name, value):
    directory = rows.write(tmp_path / "data", [], {})
    (directory / "tokenizer" / f"{of}.json").write_text(json.dumps({name: value}))
    with pytest.raises(UsageError) as refused:
        MediaProcessor.from_recipe(job(directory))
    (said,) = refused.value.violations
    assert said.startswith(name) and ": must be " in said and f"{of}.json" in str(refused.value)


def test_all_that_a_processors_file_has_wrong_is_said_at_once(tmp_path):
    directory = rows.write(tmp_path / "data", [], {})
    wrong = {"min_pixels": "64", "image_mean": 5, "image_std": [0, 0, 0], "do_resize": False, "fps": None}
    (directory / "tokenizer" / "preprocessor_config.json").write_text(json.dumps(wrong))
    with pytest.raises(UsageError) as refused:
        MediaProcessor.from_recipe(job(directory))
    assert [said.split()[0] for said in refused.value.violations] == [
        "do_resize",
        "min_pixels",
        "image_mean",
        "image_std",
    ]


@pytest.mark.parametrize("family", sorted(IMAGE_FAMILIES))
def test_settings_that_no_file_says_are_those_of_transformers(tmp_path, family):
    auto = pytest.importorskip("transformers.models.auto.image_processing_auto")
    # Qwen3-VL-MoE has the processor of Qwen3-VL, by whose name transformers finds an image processor.
    names = auto.IMAGE_PROCESSOR_MAPPING_NAMES[family.removesuffix("_moe")]
    theirs = auto.get_image_processor_class_from_name(names["pil"])()
    directory = rows.write(tmp_path / "data", [], {})
    (directory / "tokenizer" / "preprocessor_config.json").unlink()
    config = next(case.config for case in CASES if case.family == family)
    limits = ("data.images.min_pixels=null", "data.images.max_pixels=null")
    given = job(directory, *limits).dump() | {"model": {"config": config}}
    of_all = MediaProcessor.from_recipe(from_mapping(given))
    ours = of_all and of_all.images
    assert ours and (ours.mean, ours.std) == (tuple(theirs.image_mean), tuple(theirs.image_std))
    assert (ours.min_pixels, ours.max_pixels) == (theirs.size["shortest_edge"], theirs.size["longest_edge"])


def test_tokens_are_made_anew_for_other_patches(tmp_path):
    directory = rows.write(tmp_path / "d", [showing("images/a.png")], {"images/a.png": PLAIN})
    small = corpus(directory, "data.sequence_length=96").stores[0]
    large = corpus(directory, "data.sequence_length=96", "data.images={min_pixels: 1024, max_pixels: 1024}")
    assert large.stores[0].lengths[0] - small.lengths[0] == 12


def test_tokens_are_made_anew_for_rows_of_another_folder(tmp_path):
    given = [asking("<image>?", "seven", images=["images/7.png"])]
    drawn = [content(image(16, 16, seed=seed)) for seed in (1, 2)]
    folders = [rows.write(tmp_path / str(n), given, {"images/7.png": one}) for n, one in enumerate(drawn)]
    shown = [
        prepare(job(folder), tmp_path / "tokens").training.build_batch(np.asarray([0])).pixels
        for folder in folders
    ]
    assert not torch.equal(*shown)


def test_a_store_that_was_begun_goes_on_with_its_images(tmp_path):
    from bundle.data.sources import DataErrors
    from bundle.data.store import RowChunk, TokenDocument, open_store, write_store

    def document(number):
        of = tuple(picture(number, at) for at in range(number % 3))
        return TokenDocument(np.arange(number + 1, dtype=np.uint32), np.ones(number + 1, np.bool_), of)

    def picture(number, at):
        """An image, or a video that is a list, or one that is a file."""
        grid, files = (1, 2, 2 + 2 * at), tuple(bytes([number] * (number + of)) for of in (1, 2))
        if number % 3 == 1:
            return Picture(files, grid, 0.1 * number, 2.5, is_frame_list=True)
        return Picture(files[:1], grid, *((0.1 * number, 2.5) if at else ()))

    def chunks(first, until=8):
        for number in range(first, 8):
            if number == until:
                raise KeyboardInterrupt  # as a kill, it leaves what there is
            yield RowChunk([[document(number)]], DataErrors("stop").dump())

    whole, begun = tmp_path / "whole", tmp_path / "begun"
    write_store(whole, 300, chunks, DataErrors("stop"), lambda _: None)
    import bundle.data.store as store_module

    patched = pytest.MonkeyPatch()
    patched.setattr(store_module, "COMMIT_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        write_store(begun, 300, lambda first: chunks(first, until=5), DataErrors("stop"), lambda _: None)
    firsts = []

    def rest(first):
        firsts.append(first)
        return chunks(first)

    write_store(begun, 300, rest, DataErrors("stop"), lambda _: None)
    patched.undo()
    assert firsts == [5]
    one, other = open_store(whole), open_store(begun)
    assert one and other and one.facts == other.facts and one.pictures and other.pictures
    assert one.pictures.grids.tolist() == other.pictures.grids.tolist()
    wanted = [picture(number, at) for number in range(8) for at in range(number % 3)]
    for of in (one.pictures, other.pictures):
        assert [of.read_encoded_picture(number) for number in range(len(wanted))] == wanted
    assert other.pictures.find_pictures(np.asarray([4, 2])).tolist() == [3, 1, 2]
    assert {path.name for path in begun.iterdir()} == {path.name for path in whole.iterdir()}


def test_marks_are_text_where_a_row_has_no_images():
    messages = [{"role": "user", "content": "what is <image>?"}]
    assert pop_media(messages, {}) == [] and messages[0]["content"] == "what is <image>?"
    with pytest.raises(CorruptData):
        pop_media([{"role": "user", "content": "<image> and <image>"}], {"image": RowColumn("images", ["a"])})


def test_a_batch_becomes_images_of_the_model(tmp_path):
    from bundle.packing.images import ImageInputs

    given = [showing("images/a.png"), asking("?")]
    directory = rows.write(Path(tmp_path) / "data", given, {"images/a.png": PLAIN})
    recipe, made = job(directory), corpus(directory)
    vision = recipe.architecture.vision
    assert vision is not None
    batch = made.training.build_batch(np.asarray([0, 1]))
    ids, lengths = batch.ids.flatten().numpy(), np.asarray([batch.ids.shape[1]] * 2)
    images = ImageInputs.from_sequences(batch.pixels, batch.grids, ids, lengths, vision)
    assert torch.equal(images.index >= 0, batch.ids.flatten() == vision.image_token)
    assert images.index.max() == 3 and images.pixels.shape == (16, vision.values_per_patch)
