"""Rows with videos: inputs as transformers' processors make them, what is learned, what is refused."""

import base64
import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bundle.data import prepare
from bundle.data.corpus import inspect
from bundle.data.media import Medium, Picture
from bundle.data.processing import MediaProcessor
from bundle.data.sources import CorruptData
from bundle.data.tokenizers import HuggingFaceTokenizer
from bundle.data.video_decoding import VideoMetadata
from bundle.data.videos import insert_frame_times
from bundle.errors import UsageError
from bundle.packing.images import ImageInputs
from bundle.recipe import from_mapping
from tests.vision import clips, positions, reference, rows
from tests.vision.cases import CASES
from tests.vision.clips import EVERY, FAMILIES
from tests.vision.positions import laid_out
from tests.vision.rows import asking, clip, content, image

pytestmark = pytest.mark.filterwarnings("ignore")
THREE = [image(16, 16, seed=number) for number in range(3)]
MOVING = clip([image(16, 16, seed=number) for number in range(4)])


@pytest.fixture(autouse=True, scope="module")
def _transformers():
    pytest.importorskip("transformers")


def job(directory, *more, family="qwen2_5_vl"):
    return clips.job(directory, family, *more)


def corpus(directory, *more, family="qwen2_5_vl"):
    return prepare(job(directory, *more, family=family), directory / f"cache of {family}")


def failure(directory, *more, family="qwen2_5_vl"):
    with pytest.raises(UsageError) as failed:
        corpus(directory, *more, family=family)
    return " ".join(failed.value.violations)


def data(tmp_path, given, files=None):
    """A folder with rows, and the settings of both processors."""
    frames = {f"images/{number}.png": content(of) for number, of in enumerate(THREE)}
    directory = rows.write(tmp_path / "data", given, frames | {"images/a.webp": MOVING} | (files or {}))
    for name, said in (("", clips.OF_IMAGES), ("video_", clips.OF_VIDEOS)):
        (directory / "tokenizer" / f"{name}preprocessor_config.json").write_text(json.dumps(said))
    return directory


LISTED = [f"images/{number}.png" for number in range(3)]


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_are_those_of_transformers_processors(tmp_path, family):
    directory, known = clips.written(tmp_path / "clips"), json.loads(clips.KEPT.read_text())
    made = corpus(directory, family=family)
    (store,), vision = made.stores, job(directory, family=family).architecture.vision
    assert vision is not None
    for number, name in enumerate(EVERY):
        wanted = known[f"{family.removesuffix('_moe')}, {name}"]
        begin, length = store.document_starts[number], store.lengths[number]
        assert store.ids[begin : begin + length].tolist() == wanted["ids"]
        batch = made.training.build_batch(np.asarray([number]))
        assert batch.grids.tolist() == wanted["grids"]
        assert list(batch.pixels.shape) == wanted["patches"]
        assert clips.numbers(batch.pixels)["some"] == pytest.approx(wanted["some"], abs=2e-6)
        if wanted["seconds"] is not None:
            assert batch.seconds.astype(np.float32).tolist() == [np.float32(wanted["seconds"]), 0]
    counted = inspect(job(directory, family=family), made)
    assert (counted.images, counted.videos) == (len(EVERY), len(EVERY))


def test_what_is_kept_is_what_transformers_makes(tmp_path):
    pytest.importorskip("transformers.models.qwen2_vl.video_processing_qwen2_vl", exc_type=ImportError)
    assert clips.every(tmp_path / "clips") == json.loads(clips.KEPT.read_text())


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_settings_that_no_file_says_are_those_of_transformers(tmp_path, family):
    directory = data(tmp_path, [])
    for path in (directory / "tokenizer").glob("*preprocessor_config.json"):
        path.unlink()
    ours = MediaProcessor.from_recipe(job(directory, family=family))
    assert ours is not None
    v = ours.videos
    found = [v.min_pixels, v.max_pixels, v.min_frames, v.max_frames, list(v.mean), list(v.std)]
    assert found == json.loads(clips.KEPT.read_text())["defaults"][family]
    assert v.fps == 2


SIDE = st.sampled_from([2, 4, 6])
# Of a sequence: (tokens of text), (grid of an image), (grid of a video, seconds).
MOVE = st.tuples(st.integers(1, 4), SIDE, SIDE, st.floats(0.05, 9))
PIECE = st.one_of(st.tuples(st.integers(1, 5)), st.tuples(SIDE, SIDE), MOVE)
PIECES = st.lists(PIECE, min_size=1, max_size=6)


@pytest.fixture(scope="module")
def theirs():
    cases = {case.family: case for case in CASES if "Hub" in case.name}
    return {family: reference.built(cases[family]) for family in FAMILIES[:2]}


@pytest.mark.parametrize("family", FAMILIES[:2])
@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(PIECES, min_size=1, max_size=3))
def test_positions_are_those_of_transformers(theirs, family, pieces):
    vision = next(case.vision for case in CASES if case.family == family)
    each = [laid_out(of, vision.has_frame_timestamps) for of in pieces]
    lengths = np.asarray([len(ids) for ids, _, _ in each])
    ids, grids, seconds = (np.asarray([x for of in column for x in of]) for column in zip(*each, strict=True))
    of_all = grids.reshape(-1, 3).astype(np.int64), ids, lengths, vision, seconds.astype(np.float64)
    found = ImageInputs.from_sequences(torch.zeros(0), *of_all).positions
    wanted = [
        reference.positions(
            theirs[family],
            torch.tensor(ids),
            torch.tensor(grids, dtype=torch.long).reshape(-1, 3),
            torch.tensor(seconds, dtype=torch.float64),
        )
        for ids, grids, seconds in each
    ]
    assert torch.equal(found, torch.cat(wanted))


def test_positions_are_those_that_the_model_was_published_with():
    vision = replace(CASES[0].vision, tokens_per_second=positions.TOKENS_PER_SECOND)
    known = json.loads(positions.KEPT.read_text())
    for pieces, wanted in zip(positions.SEQUENCES, known, strict=True):
        ids, grids, seconds = map(np.asarray, laid_out(pieces))
        found = ImageInputs.from_sequences(
            torch.zeros(0), grids, ids, np.asarray([len(ids)]), vision, seconds
        ).positions
        assert found.T.tolist() == wanted


def test_what_is_learned_at_every_token(tmp_path):
    said = [
        {"role": "user", "content": "<video>or<image>?"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "and <video>"},
        {"role": "assistant", "content": "two"},
    ]
    row = {"messages": said, "videos": [LISTED[:2], LISTED], "images": ["images/0.png"]}
    limits = ("data.videos={min_pixels: 64, max_pixels: 64}", "data.images={min_pixels: 64, max_pixels: 64}")
    directory = data(tmp_path, [row])
    for family, videos in (("qwen2_5_vl", ["", ""]), ("qwen3_vl", ["0.1", "0.1 0.5"])):
        made = corpus(directory, *limits, family=family)
        (store,), tokenizer = made.stores, HuggingFaceTokenizer(directory / "tokenizer")
        seen = "".join(
            f"[{tokenizer.decode([int(token)])}]" if learned else tokenizer.decode([int(token)])
            for token, learned in zip(store.ids, store.loss_mask, strict=True)
        )
        for name, short in (("im_start", "^"), ("image_pad", "#"), ("video_pad", "%")):
            seen = seen.replace(f"<|{name}|>", short)
        seen = seen.replace("<|vision_start|>", "(").replace("<|vision_end|>", ")")
        end = "<|im_end|>"
        shown = ["(%)", "(%%)"] if family == "qwen2_5_vl" else [
            "".join(f"<{time} seconds>(%)" for time in times.split()) for times in videos
        ]  # fmt: skip
        turns = ((f"{shown[0]}or(#)?", "[o][n][e]"), (f"and {shown[1]}", "[t][w][o]"))
        wanted = [f"^user\n{asked}{end}\n^assistant\n{answer}[{end}][\n]" for asked, answer in turns]
        assert seen == "".join(wanted)
        assert [store.pictures.read_encoded_picture(number).is_frame_list for number in range(3)] == [
            True,
            False,
            True,
        ]


def test_parts_of_a_text_move_with_its_times(messages):
    videos = [
        Picture((), (2, 2, 2), 1.0, timestamps=(0.0, 1.25)),
        Picture((), (1, 2, 2), 1.0, timestamps=(3.0,)),
    ]
    text, parts = insert_frame_times("a<v>b (<v>) c", [(0, 1), (4, 5), (12, 13)], videos, ("(", "<v>", ")"))
    assert text == "a<0.0 seconds>(<v>)<1.2 seconds>(<v>)b <3.0 seconds>(<v>) c"
    assert [text[begin:end] for begin, end in parts] == ["a", "b", "c"]
    with pytest.raises(CorruptData, match="2 videos") as error:
        insert_frame_times("a<v>", [], videos, ("(", "<v>", ")"))
    messages(error.value)


NAMED = [
    {"type": "video", "path": "images/a.webp"},
    {"type": "video", "url": f"data:video/webp;base64,{base64.b64encode(MOVING).decode()}"},
    {"type": "video_url", "video_url": {"url": f"data:video/any;base64,{base64.b64encode(MOVING).decode()}"}},
    {"type": "video", "base64": base64.b64encode(MOVING).decode(), "fps": 5},
    {"type": "video", "video": "images/a.webp", "sample_fps": 5.0},
]


@pytest.mark.parametrize("part", NAMED)
def test_ways_to_name_a_video(tmp_path, part):
    (store,) = corpus(data(tmp_path, [asking([part])])).stores
    picture = store.pictures.read_encoded_picture(0)
    assert picture.contents == (MOVING,) and not picture.is_frame_list
    assert picture.fps == (5 if "fps" in str(part) else 4)


def test_parquet_holds_bytes(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    files = [{"bytes": content(of), "path": None} for of in THREE]
    row = asking("<video>?", videos=[files])
    directory = data(tmp_path, [])
    parquet.write_table(pyarrow.Table.from_pylist([row]), directory / "rows.parquet")
    given = f"data.path=[{directory / 'rows.parquet'}]"
    (store,) = corpus(directory, "data.source=parquet", given).stores
    assert store.pictures.read_encoded_picture(0).contents == tuple(content(of) for of in THREE)


@pytest.mark.parametrize("kind", ["WEBP", "PNG", "matroska", "mp4", "avi", "mpegts"])
def test_files_have_the_frames_that_a_list_of_them_has(tmp_path, kind):
    shown = [image(32, 48, seed=number) for number in range(12)]
    if kind in ("WEBP", "PNG"):
        of = clip(shown, kind)
    else:
        pytest.importorskip("av")
        of = rows.film(shown, 10, kind)
    processing = MediaProcessor.from_recipe(job(data(tmp_path, [])))
    assert processing is not None
    file = processing.read_bytes_and_grid(Medium("video", of, 5.0), tmp_path)
    every_other = processing.read_bytes_and_grid(
        Medium("video", [content(of) for of in shown[::2]], 5.0), tmp_path
    )
    assert (file.grid, file.seconds) == (every_other.grid, every_other.seconds) == ((3, 8, 12), 0.4)
    assert np.array_equal(processing.extract_patches(file), processing.extract_patches(every_other))


def test_a_gif_has_its_frames(tmp_path):
    shades = [
        image(16, 16, mode="L").point(lambda value, k=number: value // 2 + 9 * k) for number in range(4)
    ]
    processing = MediaProcessor.from_recipe(job(data(tmp_path, [])))
    assert processing is not None
    file, listed = (
        processing.read_bytes_and_grid(Medium("video", of, 10.0), tmp_path)
        for of in (clip(shades, "GIF"), [content(of) for of in shades])
    )
    assert np.array_equal(processing.extract_patches(file), processing.extract_patches(listed))


def test_of_every_number_of_frames_none_is_taken_behind_the_last(tmp_path):
    processing = MediaProcessor.from_recipe(
        job(data(tmp_path, []), "data.videos={fps: 2, min_frames: 4, max_frames: 768}")
    )
    assert processing is not None
    gif = clip([image(16, 16, seed=number) for number in range(75)], "GIF")
    read = processing.read_bytes_and_grid(Medium("video", gif), tmp_path)
    assert read.grid == (7, 6, 6) and len(processing.extract_patches(read)) == 7 * 6 * 6
    for count, fps in product(range(8, 900), (10, 29.97)):
        numbers = processing.videos._sample_frames(VideoMetadata(count, fps, 16, 16), 2.0)
        assert numbers == [at * count // len(numbers) for at in range(len(numbers))]
        assert len(numbers) == max(4, int(count / fps * 2) // 2 * 2)


BROKEN = [
    ("https://example.com/a.mp4", "is a URL"),
    (["images/0.png", "http://x/1.png"], "video 'http://x/1.png' is a URL"),
    ("../a.webp", "outside of the folder"),
    (["images/0.png", "images/none.png"], "video 'images/none.png': No such file"),
    (["images/0.png", "images/wide.png"], "frames of 16 x 16 and 24 x 16 pixels: all must be alike"),
    (["images/0.png", "images/cut.webp"], "JPEG, PNG or WEBP"),
    (["images/0.png"], "1 of 1 frames of a video: a patch has 2"),
    ([], "a video without frames"),
    (LISTED * 4, "a video of 12 frames exceeds data.videos.limit_frames"),
    ("images/many.webp", "a video of 12 frames exceeds data.videos.limit_frames"),
    ("images/slow.webp", "a video of 20 seconds exceeds data.videos.limit_seconds"),
    ("images/large.webp", "a video of 40 x 40 pixels exceeds data.videos.limit_pixels"),
    (["images/large.png"] * 2, "40 x 40 pixels exceeds data.videos.limit_pixels"),
    ("images/0.png", "whose frames have no durations"),
    ("images/cut.webp", "no video in GIF, WEBP, PNG or mov"),
    ("images/heavy.png", "larger than"),
    (["images/weighty.png"] * 3, "larger than"),
    (7, "a video must be a path, base64 or bytes"),
]
_LIMITS = "data.videos={limit_frames: 8, limit_seconds: 10, limit_pixels: 1024, limit_bytes: 20000}"


@pytest.mark.parametrize(("named", "why"), BROKEN, ids=[why for _, why in BROKEN])
def test_a_broken_video_is_named_or_skipped(tmp_path, named, why):
    files = {"images/cut.webp": MOVING[:-300], "images/wide.png": content(image(16, 24))}
    files |= {"images/many.webp": clip([*THREE] * 4), "images/slow.webp": clip(THREE[:2], "WEBP", 10000)}
    files |= {"images/large.webp": clip([image(40, 40, seed=of) for of in range(2)])}
    files |= {"images/large.png": content(image(40, 40)), "images/heavy.png": bytes(20001)}
    files |= {"images/weighty.png": content(THREE[0]) + bytes(9000)}
    directory = data(
        tmp_path, [asking("<video>?", videos=[LISTED]), asking("<video>", videos=[named])], files
    )
    said = failure(directory, _LIMITS)
    assert why in said and "rows.jsonl:2" in said
    made = corpus(directory, _LIMITS, "data.on_error=skip")
    assert (made.left_out.skipped, len(made.training)) == (1, 1) and why in made.left_out.skipped_rows[0]


def test_a_film_needs_pyav_and_is_named_where_it_is_none(tmp_path):
    pytest.importorskip("av")
    for of in (b"nothing", rows.film([image(16, 32)] * 3, 5)[:200]):
        directory = data(tmp_path / str(len(of)), [asking("<video>", videos=["v.mkv"])], {"v.mkv": of})
        assert "no video in" in failure(directory)


def test_a_film_cannot_name_another_file(tmp_path, monkeypatch):
    pytest.importorskip("av")
    (tmp_path / "a.ts").write_bytes(rows.film([image(16, 32)] * 3, 5, "mpegts"))
    monkeypatch.chdir(tmp_path)
    directory = data(
        tmp_path, [asking("<video>", videos=["v.mkv"])], {"v.mkv": b"ffconcat version 1.0\nfile a.ts\n"}
    )
    assert "no video in" in failure(directory)


@pytest.mark.parametrize(
    ("row", "value"),
    [
        (asking("<video><video>", videos=[LISTED]), "names 1"),
        (asking("<video>", videos=[LISTED] * 2), "names 2"),
        (asking("<|video_pad|>"), "0 videos"),
        (asking("<|video_pad|><video>", videos=[LISTED]), "1 video"),
        (asking([{"type": "video", "video": LISTED, "max_pixels": 9}]), "max_pixels"),
        (asking([{"type": "video", "video": LISTED, "fps": 0}]), "fps"),
        (asking([{"type": "video", "video": LISTED, "fps": 1, "sample_fps": 2}]), "fps"),
        (asking([{"type": "video", "video": LISTED, "path": "a"}]), "a video"),
        (asking("?", audios=["a.wav"]), "audios"),
    ],
)
@pytest.mark.parametrize("family", FAMILIES[:2])
def test_rows_whose_videos_have_no_place_are_named(tmp_path, row, value, family, messages):
    said = failure(data(tmp_path, [row]), family=family)
    assert value in said
    messages(said)


def test_a_row_with_a_video_is_not_cut(tmp_path):
    directory = data(tmp_path, [asking("<video>" + "?" * 90, videos=[LISTED]), asking("?")])
    made = corpus(directory, "data.truncation=right", "data.sequence_length=96")
    assert (made.left_out.deleted, made.left_out.cut, len(made.training)) == (1, 0, 1)


@pytest.mark.parametrize("missing", ["video_token_id", "vision_start_token_id", "vision_end_token_id"])
@pytest.mark.parametrize("family", FAMILIES[:2])
def test_a_model_whose_config_names_no_tokens_for_videos_is_given_none(tmp_path, family, missing):
    directory = data(tmp_path, [asking("<video>", videos=[LISTED])])
    config = {name: value for name, value in clips.config(family).items() if name != missing}
    recipe = from_mapping(job(directory).dump() | {"model": {"config": config}})
    if family == "qwen2_5_vl" and missing != "video_token_id":  # its template writes what stands around one
        assert len(prepare(recipe, tmp_path / "cache").training) == 1
        return
    with pytest.raises(UsageError) as failed:
        prepare(recipe, tmp_path / "cache")
    assert "video_token_id" in str(failed.value.violations)


SAID: dict[str, object] = {
    "do_resize": False,
    "do_rescale": False,
    "do_normalize": False,
    "do_convert_rgb": False,
}
SAID |= {"do_center_crop": True, "do_pad": True, "cap_pixels_per_frame": True, "num_frames": 5, "resample": 2}
SAID |= {"rescale_factor": 0.5, "patch_size": 8, "temporal_patch_size": 1, "merge_size": 4}


@pytest.mark.parametrize(("name", "of"), product(SAID, ["preprocessor", "video_preprocessor"]))
def test_what_a_processor_is_told_to_do_otherwise_is_refused_by_name(tmp_path, name, of):
    directory = data(tmp_path, [])
    path = directory / "tokenizer" / f"{of}_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: SAID[name]}))
    with pytest.raises(UsageError) as refused:
        MediaProcessor.from_recipe(job(directory))
    assert path.name in str(refused.value) and name in refused.value.violations[0]


def test_where_settings_of_videos_stand(tmp_path):
    directory = data(tmp_path, [])
    tokenizer = directory / "tokenizer"

    def found(*more, family="qwen2_5_vl"):
        made = MediaProcessor.from_recipe(job(directory, *more, family=family))
        assert made is not None
        return made.videos

    own = clips.OF_VIDEOS
    assert (found().fps, found().min_frames, found().max_frames, found().mean) == (4, 2, 6, (0.1, 0.2, 0.3))
    nested = {"video_processor": {"fps": 7, "size": {"shortest_edge": 64, "longest_edge": 128}}}
    (tokenizer / "processor_config.json").write_text(json.dumps(nested))
    assert (found().fps, found().max_pixels, found().max_frames) == (7, 128, 768)
    more = "data.videos={fps: 3, min_frames: 5, max_frames: 9, min_pixels: 65, max_pixels: 127}"
    found_more = found(more)
    assert (found_more.fps, found_more.min_frames, found_more.max_frames) == (3, 5, 9)
    assert (found_more.min_pixels, found_more.max_pixels) == (65, 127)
    for wrong, why in (
        ("data.videos={min_frames: 9, max_frames: 8}", "min_frames 9 exceeds max_frames 8"),
        ("data.videos={min_pixels: 999, max_pixels: 9}", "min_pixels 999 exceeds max_pixels 9"),
    ):
        with pytest.raises(UsageError, match=why):
            found(wrong)
    (tokenizer / "processor_config.json").unlink()
    (tokenizer / "video_preprocessor_config.json").unlink()  # the images' file is for videos, too
    assert (found().min_pixels, found().max_pixels, found().fps) == (256, 1024, 2)
    # Of Qwen3-VL's class min_pixels and max_pixels are no words.
    assert found(family="qwen3_vl").max_pixels == 32 * 32 * 768
    (tokenizer / "video_preprocessor_config.json").write_text(json.dumps(own | {"fps": "2"}))
    with pytest.raises(UsageError, match="fps '2'"):
        found()


def test_a_model_of_text_is_given_no_videos(tmp_path, messages):
    directory = data(tmp_path, [asking("<video>", videos=[LISTED])])
    text = {"model_type": "qwen2", "vocab_size": 264, "hidden_size": 64, "intermediate_size": 64}
    text |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {**text, "max_position_embeddings": 512}
    recipe = from_mapping(job(directory).dump() | {"model": {"config": config}})
    with pytest.raises(UsageError) as failed:
        prepare(recipe, tmp_path / "cache")
    assert "videos" in str(failed.value.violations)
    messages(failed.value)


def test_a_pack_has_the_videos_of_its_sequences_in_order(tmp_path):
    given = [
        asking("<video>", videos=["images/a.webp"]),
        asking("<image>" * 3, images=["images/0.png"] * 3),
        asking("<image><video>?", videos=[LISTED], images=["images/1.png"]),
    ]
    directory = data(tmp_path, given)
    made = corpus(directory, "data.packed=true", "train.micro_batch_size=1")
    batch, processing = made.training.build_batch(np.asarray([0])), MediaProcessor.from_recipe(job(directory))
    assert processing is not None
    pictures = {
        0: [Medium("video", MOVING)],
        1: [Medium("image", content(THREE[0]))] * 3,
        2: [Medium("image", content(THREE[1])), Medium("video", [content(of) for of in THREE])],
    }
    assert sorted(batch.documents.tolist()) == [0, 1, 2]
    wanted = [
        processing.read_bytes_and_grid(of, tmp_path)
        for document in batch.documents
        for of in pictures[int(document)]
    ]
    assert batch.grids.tolist() == [list(of.grid) for of in wanted]
    assert batch.seconds.tolist() == [of.seconds for of in wanted]
    assert np.array_equal(
        batch.pixels.numpy(), np.concatenate([processing.extract_patches(of) for of in wanted])
    )
