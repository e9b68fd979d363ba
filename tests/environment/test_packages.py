"""Packages by metadata and source text, whatever importlib.metadata has been made to say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import InvalidSpecifier

from bundle.environment import packages
from bundle.environment.packages import InstalledPackages, detect
from bundle.environment.search import build_search_path


def stack(*paths: Path) -> InstalledPackages:
    return InstalledPackages(build_search_path([str(path) for path in paths], "", Path("/nonexistent")))


def install(site: Path, name: str, version: str, direct_url: object = None) -> Path:
    directory = site / f"{name.replace('-', '_')}-{version}.dist-info"
    directory.mkdir(parents=True)
    (directory / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nVersion: 9\n"
    )
    if direct_url is not None:
        (directory / "direct_url.json").write_text(json.dumps(direct_url))
    return directory


def test_the_first_distribution_on_the_path_wins(tmp_path: Path):
    install(tmp_path / "a", "torch-npu", "2.7.1.post4")
    install(tmp_path / "b", "torch-npu", "2.9.0")
    package = stack(tmp_path / "a", tmp_path / "b").find_package("torch-npu")
    assert package is not None and package.version == "2.7.1.post4" and package.base_version == "2.7.1"


def test_a_package_that_is_only_on_the_path_says_its_version_in_its_source(tmp_path: Path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    (tmp_path / "torch/version.py").write_text("__version__: str = '2.13.0+cpu'\n")
    package = stack(tmp_path).find_package("torch")
    assert package is not None and (package.version, package.base_version) == ("2.13.0+cpu", "2.13.0")


def test_a_package_that_came_within_the_clock_s_tick_is_found(tmp_path: Path):
    when = tmp_path.stat()
    assert (
        stack(tmp_path).find_package("torch") is None
    )  # Python keeps what it saw of a directory, by its time
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("__version__ = '2.13.0'\n")
    os.utime(tmp_path, ns=(when.st_atime_ns, when.st_mtime_ns))
    package = stack(tmp_path).find_package("torch")
    assert package is not None and package.version == "2.13.0"


def test_an_editable_checkout_is_identified_by_its_commit(tmp_path: Path):
    checkout, sha = tmp_path / "checkout", "d0d5809d" + "0" * 32
    (checkout / "mindspeed").mkdir(parents=True)
    (checkout / "mindspeed/__init__.py").touch()
    (checkout / ".git").mkdir()
    (checkout / ".git/HEAD").write_text(sha + "\n")
    record = {"url": checkout.as_uri(), "dir_info": {"editable": True}}
    install(tmp_path / "site", "mindspeed", "0.12.1", record)
    package = stack(tmp_path / "site", checkout).find_package(
        "mindspeed"
    )  # its .pth file puts it on the path
    assert package is not None
    assert (package.version, package.commit, package.path) == ("0.12.1", sha, checkout / "mindspeed")


@pytest.mark.parametrize(
    "record", [[], {"url": 3, "dir_info": {"editable": True}}, {"vcs_info": {"commit_id": 7}}]
)
def test_a_broken_origin_record_is_as_good_as_none(tmp_path: Path, record: object):
    install(tmp_path, "mindspeed", "0.12.1", record)
    package = stack(tmp_path).find_package("mindspeed")
    assert package is not None and package.commit is None


@pytest.mark.parametrize(("name", "version"), [("METADATA", None), ("direct_url.json", "0.12.1")])
def test_a_pipe_in_the_place_of_a_record_is_not_waited_for(tmp_path: Path, name: str, version: str | None):
    file = install(tmp_path, "mindspeed", "0.12.1") / name
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    package = stack(tmp_path).find_package("mindspeed")
    assert (package.version if package else None) == version


def test_a_directory_of_the_same_name_is_no_package(tmp_path: Path):
    (tmp_path / "triton").mkdir()
    assert stack(tmp_path).find_package("triton") is None


def test_nothing_is_installed_on_an_empty_path(tmp_path: Path):
    assert stack(tmp_path).list_tracked_packages() == ()


def test_this_environment_is_read_without_importing_what_it_holds():
    packages = {package.name: package.version for package in detect().list_tracked_packages()}
    import importlib.metadata

    for name in ("torch", "numpy", "triton"):
        if name in packages:
            assert packages[name] == importlib.metadata.version(name)
    script = (
        "import sys; from bundle.environment.packages import detect; "
        "detect().list_tracked_packages(); print(*sys.modules)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "numpy", "megatron", "triton"} & set(loaded)


def test_a_lie_through_importlib_metadata_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.2.0")
    assert stack(tmp_path).find_package("transformer-engine") is None


@pytest.mark.parametrize(
    ("version", "specifier", "inside"),
    [
        ("0.17.0rc0", ">=0.17", True),
        ("0.16.0rc0+g1234abc", ">=0.16,<0.17", True),
        ("0.20.0+1234abc", "<0.20", False),
        ("0.16.2", "<0.18", True),
        ("0.16.2", "", True),
        ("not a version", "<0.18", None),
    ],
)
def test_ranges_are_read_on_the_base_version(version: str, specifier: str, inside: bool | None):
    assert packages.is_base_version_within(version, specifier) is inside


@pytest.mark.parametrize("specifier", ["0.17", ">=new"])
def test_a_range_that_is_none_is_not_passed_over(specifier: str):
    with pytest.raises(InvalidSpecifier):
        packages.is_base_version_within("0.17.0", specifier)
