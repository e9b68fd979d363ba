"""Digests and hashes are filled from a server and a registry's client, which are processes of the test."""

import json
import re
import subprocess
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.command import ROOT
from tests.tools.images.checkouts import copied
from tools.images import agreement, definition, locks, page, pins

DIGESTS = {"docker.io/library/debian:bookworm-slim": "1" * 64, "docker.io/nvidia/cuda:13.0.2-base": "2" * 64}
WHEELS = {
    "torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl": "a" * 64,
    "torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_aarch64.whl": "b" * 64,
    "torch-2.13.0%2Bcpu-cp312-cp312-manylinux_2_28_x86_64.whl": "c" * 64,
    "torch-2.13.0%2Bcpu-cp311-cp311-win_amd64.whl": "d" * 64,
    "torch-2.13.0-cp311-none-macosx_11_0_arm64.whl": "e" * 64,
    "torch-2.13.1%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl": "f" * 64,
    "torch-2.10.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl": "0" * 64,
    "torch-latest.whl": "1" * 64,
}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder, and the address at which a server has it."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield folder, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def root(tmp_path: Path, served: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose index, sources and registry are here; two images and the MindSpeeds are missing."""
    folder, address = served
    root = copied(tmp_path / "copy")
    hcl = root / "docker-bake.hcl"
    hcl.write_text(hcl.read_text().replace("https://download.pytorch.org/whl/cpu", f"{address}/whl"))
    (folder / "whl/torch").mkdir(parents=True)
    links = [f'<a href="/whl/cpu/{name}#sha256={digest}">x</a><br/>' for name, digest in WHEELS.items()]
    (folder / "whl/torch/index.html").write_text("\n".join(links))
    (folder / "aws-efa-installer-1.47.0.tar.gz").write_bytes(b"\0efa" * 1_000_000)
    monkeypatch.setattr(agreement, "address", lambda archive, commit: f"{address}/{Path(archive).name}")
    answers = {image: json.dumps({"digest": f"sha256:{digest}"}) for image, digest in DIGESTS.items()}
    for image in ("docker.io/nvidia/cuda:13.0.2-devel-ubuntu24.04",):
        answers[image] = json.dumps({"digest": "sha512:0"})
    cases = "\n".join(f"*{image}*) echo '{answer}' ;;" for image, answer in answers.items())
    client = tmp_path / "bin/docker"
    client.parent.mkdir()
    client.write_text(f'#!/bin/sh\ncase "$*" in\n{cases}\n*) echo "no such image" >&2; exit 1 ;;\nesac\n')
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{client.parent}:/usr/bin:/bin")
    return root


def test_what_is_published_is_filled_and_the_rest_is_named(root, served):
    before = (root / definition.FILE).read_text()
    filled, failures = pins.fill(root)
    assert filled == [
        "BASES.cpu.digest",
        "BASES.cuda.digest",
        "SOURCES.efa-installer.checksum",
        "STACKS.cpu.pins.torch.hashes",
        "STACKS.ascend.pins.torch.hashes",
        "STACKS.ascend-mcore0.16.pins.torch.hashes",
    ]
    assert [text.partition(":")[0] for text in failures] == [
        "BASES.nvcc.digest",
        "BASES.ascend-a2.digest",
        "BASES.ascend-a3.digest",
        "SOURCES.mindspeed-core-r0.15.3.checksum",
        "SOURCES.mindspeed-core-r0.16.0.checksum",
        "STACKS.ascend-mcore0.15.pins.torch.hashes",
    ]
    images = definition.load(root)
    assert {name: base.digest[7:8] for name, base in images.bases.items()} == {
        "cpu": "1", "cuda": "2", "nvcc": "", "ascend-a2": "", "ascend-a3": "",
    }  # fmt: skip
    archive = served[0] / "aws-efa-installer-1.47.0.tar.gz"
    digest = subprocess.run(["sha256sum", archive], capture_output=True, text=True, check=True).stdout[:64]
    assert images.sources["efa-installer"].checksum == f"sha256:{digest}"
    assert images.stacks["cpu"].pins["torch"].hashes == [f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"]
    assert images.stacks["ascend"].pins["torch"].hashes == [f"sha256:{'0' * 64}"]
    # The rest of the file stays as somebody wrote it.
    after = (root / definition.FILE).read_text()
    assert re.sub(r'"sha256:[0-9a-f]{64}"(, )?', "", after) == re.sub(
        r'""', lambda m: "" if m.start() in empty_places(before, after) else '""', before
    )
    assert [text.partition(":")[0] for text in agreement.unfilled(images)] == [
        text.partition(":")[0] for text in failures
    ]


def empty_places(before: str, after: str) -> set[int]:
    """Where the empty texts of a file are that have a value in another."""
    lines = list(zip(before.splitlines(keepends=True), after.splitlines(keepends=True), strict=True))
    starts = [sum(len(old) for old, _ in lines[:number]) for number in range(len(lines))]
    return {start + old.index('""') for start, (old, new) in zip(starts, lines, strict=True)
            if old != new and '""' in old}  # fmt: skip


def test_the_locks_and_the_page_follow_and_a_second_time_changes_nothing(root):
    pins.fill(root)
    images, project = definition.load(root), locks.project(root)
    (root / page.FILE).write_text(page.markdown(images))
    assert list(agreement.disagreements(root, images, project)) == []
    lock = (root / "images/locks/cpu.torch.txt").read_text()
    assert lock.splitlines()[1:] == [
        "torch==2.13.0 \\",
        f"    --hash=sha256:{'a' * 64} \\",
        f"    --hash=sha256:{'b' * 64}",
    ]
    texts = {path: path.read_text() for path in root.rglob("*.*") if path.is_file()}
    filled, _ = pins.fill(root)
    assert filled == []
    assert texts == {path: path.read_text() for path in root.rglob("*.*") if path.is_file()}


def test_the_makefile_installs_the_version_of_a_lock_with_hashes(root, tmp_path):
    pins.fill(root)
    (recipe,) = re.findall(r"grep -oE '[^']+' images/locks/cpu.torch.txt", (ROOT / "Makefile").read_text())
    done = subprocess.run(["sh", "-c", recipe], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "torch==2.13.0\n"
