"""One place of versions: everything follows it, and what does not is named."""

import copy
import json

import pytest

from bundle.errors import UsageError
from bundle.targets import images
from tests.tools.images.checkouts import ROOT, change, copied
from tools.images import agreement, definition, locks, page
from tools.images.plan import read

PRINTED = (ROOT / "tests/tools/images/bake.json").read_text()


@pytest.fixture
def root(tmp_path):
    return copied(tmp_path / "copy")


def found(root, printed=PRINTED):
    images, own = definition.load(root), locks.project(root)
    return [
        *agreement.disagreements(root, images, own),
        *agreement.of_plan(read(printed), root, images, own),
    ]


def test_everything_follows():
    assert found(ROOT) == []


def test_one_version_is_named_everywhere_it_must_follow(root):
    change(root, "STACKS", "ascend-mcore0.15", "pins", "torch-npu", "version", value="2.7.1.post9")
    told = found(root)
    assert sum("locks/ascend-mcore0.15." in line for line in told) == 2
    assert sum("docs/images.md" in line for line in told) == 1
    assert sum(line.startswith(("ascend-a2-mcore0-15:", "ascend-a3-mcore0-15:")) for line in told) == 2
    assert len(told) == 5


def test_one_version_changes_lock_input_and_page_by_itself(root):
    change(root, "STACKS", "cuda-mcore0.16", "pins", "sglang", "version", value="0.5.17")
    images, own = definition.load(root), locks.project(root)
    assert "sglang==0.5.17" in locks.input_text(images, own, "cuda-mcore0.16")
    assert "sglang==0.5.17" not in locks.input_text(images, own, "cuda-mcore0.19")
    assert "| sglang | 0.5.17 |" in page.markdown(images)


def test_launch_knows_the_images_by_the_tags_that_bake_gives_them(root):
    tags = [tag for target in json.loads(PRINTED)["target"].values() for tag in target.get("tags", ())]
    assert sorted(
        f"{images.LOCAL_BUILD_IMAGE_PREFIX}/{image.tag}" for image in images.load_images()
    ) == sorted(tags)
    change(root, "STACKS", "cpu", "pins", "megatron-core", "version", value="0.17.0")
    assert any("targets/images.json" in line for line in found(root))


def test_a_base_is_named_where_bake_has_another(root):
    change(root, "BASES", "cpu", "image", value="docker.io/library/debian:trixie-slim")
    assert any(line.startswith("cpu: BASE is ") for line in found(root))


def test_a_requirement_that_no_lock_meets(root):
    file = root / "pyproject.toml"
    file.write_text(file.read_text().replace('"einops"', '"einops>=99"'))
    told = [line for line in found(root) if "asks for einops>=99" in line]
    assert len(told) == len(definition.load(root).stacks)


def test_a_lock_without_a_hash(root, messages):
    file = root / "images/locks/cpu.txt"
    lines = file.read_text().splitlines(keepends=True)
    start = next(index for index, line in enumerate(lines) if line.startswith("einops=="))
    lines[start : start + 3] = ["einops==0.8.2\n"]
    file.write_text("".join(lines))
    (told,) = [line for line in found(root) if "hash" in line]
    assert "locks/cpu.txt" in told and "einops" in told
    messages(told)


def test_a_part_is_what_its_extras_lead_to(root):
    images, own = definition.load(root), locks.project(root)
    whole = "".join(f"{head} \\\n    --hash=sha256:0\n{via}" for head, via in [
        ("typer==1", "    # via -r cpu.in\n"),
        ("click==1", "    # via typer\n"),
        ("tqdm==1", "    # via\n    #   -r cpu.in\n    #   transformers\n"),
        ("filelock==1", "    # via\n    #   tqdm\n    #   torch\n"),
        ("transformers==1", "    # via -r cpu.in\n"),
    ])  # fmt: skip
    part = locks.part_texts(images, own, "cpu", whole)["cpu.demo.txt"]
    assert set(locks.versions(part)) == {"typer", "click", "filelock"}


def test_a_part_that_is_not_of_its_lock_is_named(root, messages):
    file = root / "images/locks/cpu.demo.txt"
    file.write_text(file.read_text().replace("einops==", "einops==9.", 1))
    (told,) = [line for line in found(root) if "cpu.demo.txt" in line]
    messages(told)


@pytest.mark.parametrize(
    ("before", "after", "value"),
    [
        ("ARG REVISION=\n", "", "REVISION"),
        ("ARG INPUTS=\n", "ARG INPUTS=\nARG TUNE=\n", "TUNE"),
        ("ARG BASE=scratch", "ARG BASE=debian:12", "debian:12"),
    ],
)
def test_a_dockerfile_that_does_not_fit_bake(root, before, after, value, messages):
    file = root / "images/cpu/Dockerfile"
    assert before in file.read_text()
    file.write_text(file.read_text().replace(before, after))
    (told,) = found(root)
    assert "images/cpu/Dockerfile" in told and value in told
    messages(told)


def test_a_tag_says_its_stack(root):
    plan = copy.deepcopy(json.loads(PRINTED))
    plan["target"]["cpu"]["tags"] = ["x/cpu:latest"]
    del plan["target"]["cuda-mcore0-19"]
    told = found(root, json.dumps(plan))
    assert any("x/cpu:latest" in line and f":{locks.project(root).version}-" in line for line in told)
    assert any(line.startswith("bake builds ") for line in told)


def test_a_release_lacks_what_nobody_could_read():
    images = definition.load(ROOT)
    lacking = list(agreement.unfilled(images))
    empty = [name for name, base in images.bases.items() if not base.digest]
    assert sum(line.startswith("BASES.") for line in lacking) == len(empty)
    assert all(line.split(".")[0] in ("BASES", "SOURCES", "STACKS") for line in lacking)


def test_a_filled_release_lacks_nothing(root):
    document = json.loads((root / "docker-bake.json").read_text())
    some = "sha256:" + "0" * 64
    for name in document["variable"]["BASES"]["default"]:
        change(root, "BASES", name, "digest", value=some)
    for name in document["variable"]["SOURCES"]["default"]:
        change(root, "SOURCES", name, "checksum", value=some)
    for name, stack in document["variable"]["STACKS"]["default"].items():
        if "hashes" in stack["pins"]["torch"]:
            change(root, "STACKS", name, "pins", "torch", "hashes", value=[some])
    assert list(agreement.unfilled(definition.load(root))) == []


def test_an_extra_that_is_not_there_is_a_usage_error(root, messages):
    change(root, "STACKS", "cpu", "extras", value=["gpu"])
    with pytest.raises(UsageError, match="'gpu'") as error:
        found(root)
    messages(error.value)
