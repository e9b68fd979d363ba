"""Names of files that cannot be, places that nobody may read, and directories that no run may take."""

import os
from pathlib import Path

import pytest

from bundle.files import is_directory
from tests.command import capture_bundle

LONG = "/".join(["a" * 200] * 25)
LONG_NAME = "a" * 5000


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("some text\n" * 400)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def entries(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.mark.parametrize("name", [LONG, LONG_NAME], ids=["path", "name"])
@pytest.mark.parametrize(
    "words",
    [
        ["plan", "./NAME"],
        ["plan", "demo", "--set=data.path=NAME"],
        ["plan", "demo", "--set=data.tokenizer=hf:NAME"],
        ["plan", "demo", "--set=model.path=NAME"],
        ["plan", "demo", "--set=data.cache=NAME"],
        ["plan", "demo", "--from=NAME"],
        ["plan", "demo", "--run-directory=NAME", "--from=NAME"],
        ["check", "demo", "--run-directory=NAME"],
        ["check", "demo", "--set=data.cache=NAME"],
        ["train", "demo", "--run-directory=NAME"],
        ["train", "--job=NAME"],
        ["generate", "NAME", "--prompt=a"],
        ["weights", "export", "NAME", "out"],
    ],
    ids=" ".join,
)
def test_a_name_that_no_file_can_have_is_refused(words, name, working_directory):
    before = entries(working_directory)
    code, text = capture_bundle(*(word.replace("NAME", name) for word in words))
    assert code == 2 and "aaaa" in text
    assert entries(working_directory) == before


@pytest.mark.parametrize("verb", ["plan", "check", "train"])
def test_data_that_cannot_be_read_is_named_and_none_of_it_is_skipped(verb, working_directory):
    data = working_directory / "data"
    data.mkdir()
    (data / "good.txt").write_text("some text\n" * 400)
    (data / "loop.txt").symlink_to(data / "loop.txt")
    code, text = capture_bundle(verb, "demo", "--set", "data.path=data")
    assert code == 2 and "data.path 'data':" in text and "data/loop.txt" in text
    assert entries(working_directory) == ["data", "data/good.txt", "data/loop.txt", "text.txt"]


@pytest.mark.parametrize("path", ["/", "//", "/..", "/proc/.."])
def test_data_is_not_looked_for_in_the_whole_file_system(path):
    code, text = capture_bundle("plan", "demo", f"--set=data.path={path}")
    assert code == 2 and f"data.path {path!r}: " in text


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads all")
def test_a_folder_of_data_that_nobody_may_list_is_named(working_directory):
    (working_directory / "data" / "closed").mkdir(parents=True, mode=0)
    (working_directory / "data" / "good.txt").write_text("some text\n" * 400)
    code, text = capture_bundle("check", "demo", "--set", "data.path=data")
    assert code == 2 and "data/closed" in text


@pytest.mark.parametrize("verb", ["plan", "check", "train"])
@pytest.mark.parametrize("place", ["", "  ", "/", ".", "model", "full"])
def test_a_directory_with_other_files_is_no_run_directory(verb, place, working_directory):
    for name in ("model/config.json", "full/thesis.txt"):
        (working_directory / name).parent.mkdir()
        (working_directory / name).write_text("{}")
    before = entries(working_directory), os.listdir("/")  # noqa: PTH208
    code, text = capture_bundle(verb, "demo", "--set=data.path=text.txt", f"--run-directory={place}")
    assert code == 2 and "--run-directory" in text
    assert (entries(working_directory), os.listdir("/")) == before  # noqa: PTH208


@pytest.mark.parametrize(
    "made",
    [
        [],
        ["volume/lost+found/"],
        ["volume/lost+found/", "volume/lost+found/#12"],
        ["volume/logs/1", "volume/.lock"],
    ],
)
def test_an_empty_directory_or_a_mounted_volume_is_one(made, working_directory):
    place = working_directory / "volume"
    place.mkdir()
    for name in made:
        path = working_directory / name
        path.parent.mkdir(exist_ok=True)
        path.mkdir() if name.endswith("/") else path.touch()
    code, text = capture_bundle("plan", "demo", "--set=data.path=text.txt", f"--run-directory={place}")
    assert code == 0, text


def test_a_new_directory_below_the_model_is_one(working_directory):
    (working_directory / "model").mkdir()
    (working_directory / "model" / "config.json").write_text("{}")
    code, text = capture_bundle("plan", "demo", "--set=data.path=text.txt", "--run-directory=model/run")
    assert code == 0, text
    assert not is_directory(working_directory / "model" / "run")


@pytest.mark.parametrize("name", ["", "  "])
@pytest.mark.parametrize("option", ["--model", "--data", "--output"])
@pytest.mark.parametrize("verb", ["sft", "dpo", "pretrain", "init"])
def test_an_empty_name_is_not_the_working_directory(verb, option, name, working_directory):
    (working_directory / "config.json").write_text("{}")
    before = entries(working_directory)
    words = [verb, "--model=.", "--data=text.txt", f"{option}={name}"]
    code, text = capture_bundle(*words)
    assert code == 2 and f"'{option}'" in text
    assert entries(working_directory) == before


@pytest.mark.parametrize("key", ["data.path", "model.path", "model.lora.path", "data.cache"])
def test_a_recipe_names_no_empty_path(key, working_directory):
    (working_directory / "config.json").write_text("{}")
    value = '[""]' if key == "data.path" else '""'
    code, text = capture_bundle("plan", "demo", f"--set={key}={value}")
    assert code == 2 and key in text
