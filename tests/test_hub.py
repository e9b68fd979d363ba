"""Models and data sets of a Hub: a local server with its routes, the cache, and what is refused."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from bundle.hub import find_reference, strip_revision
from tests.command import run_bundle
from tests.reference.configs import CONFIGS

pytest.importorskip("huggingface_hub")
OLD, NEW = "1" * 40, "2" * 40
ROWS = "hf://datasets/org/rows"


class Server(ThreadingHTTPServer):
    """A Hub: repositories by kind, name and commit; what was asked for, and what is denied."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories = {}  # (kind, name): {commit: {file: bytes}}
        self.main = NEW
        self.denied = {}  # name: (status, code of the error)
        self.asked = []

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0].strip("/")
        self.server.asked.append(path)
        parts = path.split("/")
        is_api = parts[0] == "api"
        parts = parts[1:] if is_api else parts
        kind = parts.pop(0) if parts[0] in ("models", "datasets") else "models"
        name, inside = "/".join(parts[:2]), "/".join(parts[4:])
        verb, revision = [*parts[2:4], "", ""][:2]
        if name in self.server.denied:
            status, code = self.server.denied[name]
            self.answer(status, b"{}", {"X-Error-Code": code} if code else {})
            return
        commits = self.server.repositories.get((kind, name))
        if commits is None:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        commit = self.server.main if revision in ("", "main") else revision
        if commit not in commits:
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        files = commits[commit]
        if is_api and verb == "tree":
            entries = [
                {"type": "file", "path": p, "size": len(c), "oid": digest(c)} for p, c in files.items()
            ]
            self.answer(200, json.dumps(entries).encode())
            return
        if is_api:
            siblings = [{"rfilename": p, "size": len(c), "blobId": digest(c)} for p, c in files.items()]
            info = {"id": name, "sha": commit, "siblings": siblings, "private": False, "downloads": 0,
                    "likes": 0, "tags": [], "gated": False, "disabled": False}  # fmt: skip
            self.answer(200, json.dumps(info).encode())
            return
        if inside not in files:
            self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        content = files[inside]
        self.answer(200, content, {"ETag": f'"{digest(content)}"', "X-Repo-Commit": commit})

    def answer(self, status, content, headers=None):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def digest(content):
    return hashlib.sha1(content).hexdigest()


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def environment(server, home, **variables):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    address = {"HF_ENDPOINT": server.address if server else "http://127.0.0.1:9"}
    return clean | address | {"HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"} | variables


def pin(text, kind, server, home, **variables):
    """(pinned text, its place, exit code) or (error, "", exit code), in a process of its own."""
    script = (
        "import sys\nfrom bundle import hub\nfrom bundle.errors import BundleError\n"
        "try:\n    pinned = hub.download_and_pin(*sys.argv[1:])\n"
        "    print(pinned); print(hub.build_cache_path_if_pinned(pinned, sys.argv[2]))\n"
        "except BundleError as error:\n    print(error); print(); sys.exit(int(error.code))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, text, kind],
        env=environment(server, home, **variables), capture_output=True, text=True, cwd=home, timeout=120,
    )  # fmt: skip
    assert done.returncode in (0, 2, 3), done.stderr
    said, place = done.stdout.rstrip("\n").split("\n") if done.returncode == 0 else (done.stdout, "")
    return said, place, done.returncode


FILES = {
    "config.json": b"{}", "model.safetensors": b"new", "tokenizer.model": b"t", "chat_template.jinja": b"j",
    "pytorch_model.bin": b"pickle", "modeling_x.py": b"code", "x.pt": b"pickle",
    "original/a.safetensors": b"o",
}  # fmt: skip
READ = {"config.json", "model.safetensors", "tokenizer.model", "chat_template.jinja"}


def names_in(place):
    return {path.relative_to(place).as_posix() for path in Path(place).rglob("*") if path.is_file()}


def test_a_model_is_pinned_and_only_safe_files_of_it_are_downloaded(server, tmp_path):
    server.repositories["models", "org/name"] = {NEW: FILES, OLD: FILES | {"model.safetensors": b"old"}}
    said, place, _ = pin("org/name", "model", server, tmp_path)
    assert said == f"org/name@{NEW}" and names_in(place) == READ
    assert not any(path.endswith((".bin", ".py", ".pt")) for path in server.asked)
    server.main = OLD  # the branch moves
    asked = len(server.asked)
    assert pin(said, "model", server, tmp_path)[:2] == (said, place)
    assert len(server.asked) == asked, "a commit that is in the cache needs no network"
    assert Path(place, "model.safetensors").read_bytes() == b"new"
    (tmp_path / "node").mkdir()  # another node, which gets the job file
    assert pin(said, "model", server, tmp_path / "node")[0] == said
    moved, place, _ = pin("org/name@main", "model", server, tmp_path)
    assert moved == f"org/name@{OLD}" and Path(place, "model.safetensors").read_bytes() == b"old"


def test_a_data_set_may_name_files_inside(server, tmp_path):
    files = {"data/train-0.jsonl": b"{}", "data/test-0.jsonl": b"{}", "data/load.py": b"code",
             "data/x.bin": b"pickle", "load.py": b"code", "README.md": b"x"}  # fmt: skip
    server.repositories["datasets", "org/rows"] = {NEW: files}
    said, place, _ = pin("org/rows", "dataset", server, tmp_path)
    assert said == f"{ROWS}@{NEW}" and names_in(place) == set(list(files)[:2])
    for inside in ("data", "data/", "data/t*"):  # of a folder, too, code is not downloaded
        assert pin(f"{ROWS}/{inside}", "dataset", server, tmp_path)[2] == 0
    assert names_in(place) == set(list(files)[:2])
    assert not any(path.endswith((".py", ".md", ".bin")) for path in server.asked)
    inside = f"{ROWS}@{NEW}/data/test-0.jsonl"
    assert pin(inside.replace(NEW, "main"), "dataset", server, tmp_path)[:2] == (
        inside,
        f"{place}/data/test-0.jsonl",
    )


def test_without_a_network_the_cache_is_what_there_is(server, tmp_path):
    server.repositories["models", "org/name"] = {NEW: FILES}
    said, place, _ = pin("org/name", "model", server, tmp_path)
    for variables in ({"HF_HUB_OFFLINE": "1"}, {}):
        assert pin("org/name", "model", None, tmp_path, **variables)[:2] == (said, place)
        error, _, code = pin("org/other", "model", None, tmp_path, **variables)
        assert code == 3 and "org/other" in error and "HF_HOME" in error and "hf download" in error


@pytest.mark.parametrize(
    ("status", "code", "exit_code", "named"),
    [
        (401, "RepoNotFound", 2, "HF_TOKEN"),
        (404, "RepoNotFound", 2, "HF_TOKEN"),
        (403, "GatedRepo", 3, "HF_TOKEN"),
        (403, "", 3, "HF_TOKEN"),
        (404, "RevisionNotFound", 2, "no revision 'gone'"),
    ],
)
def test_what_the_hub_refuses_is_told(server, tmp_path, status, code, exit_code, named):
    server.denied["org/name"] = status, code
    error, _, found = pin("org/name@gone", "model", server, tmp_path, HF_TOKEN="hf_secret")
    assert (found, "org/name" in error, named in error) == (exit_code, True, True)
    assert "hf_secret" not in error


def test_weights_in_pickles_alone_are_refused_before_a_download(server, tmp_path):
    server.repositories["models", "org/name"] = {NEW: {"config.json": b"{}", "pytorch_model.bin": b"pickle"}}
    error, _, code = pin("org/name", "model", server, tmp_path)
    assert code == 2 and "pytorch_model.bin" in error and not any("resolve" in path for path in server.asked)
    server.repositories["datasets", "org/rows"] = {NEW: {"rows.csv": b"x", "load.py": b"x"}}
    error, _, code = pin("org/rows", "dataset", server, tmp_path)
    assert code == 2 and "rows.csv" in error


def test_files_that_the_disk_has_no_room_for_are_not_begun(server, tmp_path, monkeypatch):
    from bundle import hub
    from bundle.errors import EnvironmentUnfit

    library = pytest.importorskip("huggingface_hub")
    pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(library.constants, "HF_HUB_CACHE", str(tmp_path / "not" / "there"))
    monkeypatch.setattr(hub, "_find_cached_commit", lambda *_: "")
    with pytest.raises(EnvironmentUnfit, match="HF_HOME"):
        hub._check_disk_space(library, hub.RepositoryReference("model", "org/name", NEW), 2**80)


def test_paths_are_not_repositories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert find_reference("org/name", "model") is None
    for path in (
        "/org/other",
        "./org/other",
        "org",
        "a/b/c",
        "../a/b",
        "data/rows.jsonl",
        "a/*",
        "bytes",
        "",
    ):
        assert find_reference(path, "dataset") is None, path
    assert strip_revision(f"org/other@{NEW}") == "org/other" and strip_revision("org/name") == "org/name"
    assert find_reference("Qwen/Qwen2.5-0.5B", "model") and find_reference("hf://org/name", "model")
    assert find_reference("hf://datasets/a/b@v1/c/*.parquet", "dataset") == (
        "dataset",
        "a/b",
        "v1",
        "c/*.parquet",
    )


def test_a_job_names_commits_and_reads_the_cache(server, tmp_path):
    """From names alone: the plan writes a job file, and what reads it needs no network."""
    config = json.dumps(CONFIGS["qwen2"] | {"vocab_size": 512}).encode()
    server.repositories["models", "org/name"] = {NEW: {"config.json": config}}
    rows = b'{"text": "hello there, this is a text"}\n'
    server.repositories["datasets", "org/rows"] = {NEW: {"train.jsonl": rows, "test.jsonl": b"broken"}}
    (tmp_path / "job.yaml").write_text(
        "{name: job, task: pretrain, model: {path: org/name}, train: {steps: 1, global_batch_size: 1},"
        " data: {path: org/rows, tokenizer: bytes, validation: 0, sequence_length: 8},"
        " optimizer: {warmup_steps: 0}}"
    )

    def run(*arguments, server=server):
        return run_bundle(*arguments, base=environment(server, tmp_path), cwd=tmp_path)

    planned = run("plan", "./job.yaml", "--job", "job.json")
    assert planned.returncode == 0, planned.stderr + planned.stdout
    recipe = json.loads((tmp_path / "job.json").read_text())["recipe"]
    assert recipe["model"]["path"] == f"org/name@{NEW}"
    revisions = [path.rpartition("/")[2] for path in server.asked if path.startswith("api/models/")]
    assert revisions.count("main") == 1
    assert recipe["data"]["path"] == [f"{ROWS}@{NEW}"]
    checked = run("check", "./job.yaml", "--json", server=None)
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout)["documents"] == 1  # of the split train
    (tmp_path / "other").mkdir()
    refused = run("plan", "./job.yaml", "--set", "model.path=org/other", server=None)
    assert refused.returncode == 3
    assert "model.path" in refused.stderr and "org/other" in refused.stderr


def test_an_adapter_of_the_hub_is_pinned_and_read_from_the_cache(server, tmp_path):
    from safetensors.numpy import save

    config = CONFIGS["qwen2"] | {"vocab_size": 512}
    rows, columns = config["num_attention_heads"] * config["head_dim"], config["hidden_size"]
    module = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    shapes = {"A": (4, columns), "B": (rows, 4)}
    weights = save(
        {
            module.format(layer, matrix): np.ones(shape, np.float32)
            for layer in range(config["num_hidden_layers"])
            for matrix, shape in shapes.items()
        }
    )
    adapter = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    server.repositories["models", "org/adapter"] = {
        NEW: {"adapter_config.json": json.dumps(adapter).encode(), "adapter_model.safetensors": weights}
    }
    server.repositories["models", "org/other"] = {NEW: {"adapter_config.json": b"{}", "x.bin": b"pickle"}}
    (tmp_path / "rows.txt").write_text("a text\n" * 100)
    (tmp_path / "job.yaml").write_text(
        json.dumps(
            {
                "name": "job",
                "task": "pretrain",
                "model": {"config": config, "lora": {"path": "org/adapter"}},
                "data": {"path": ["rows.txt"], "tokenizer": "bytes", "sequence_length": 8},
                "train": {"steps": 1, "global_batch_size": 1},
            }
        )
    )

    def plan(*arguments, server):
        return run_bundle("plan", "./job.yaml", *arguments, base=environment(server, tmp_path), cwd=tmp_path)

    for hub in (server, None):
        planned = plan("--job", "job.json", server=hub)
        assert planned.returncode == 0, planned.stderr + planned.stdout
        lora = json.loads((tmp_path / "job.json").read_text())["recipe"]["model"]["lora"]
        assert (lora["path"], lora["rank"], lora["targets"]) == (f"org/adapter@{NEW}", 4, ["q_proj"])
    refused = plan("--set", "model.lora.path=org/other", server=server)
    assert refused.returncode == 2
    assert "model.lora.path: " in refused.stderr and "adapter_config.json: " in refused.stderr
