"""Contract, not SGLang: an HTTP server that keeps tensors and does what SGLang's sources say, traps included.

It follows the protocol of 0.5.16 ("old") or of 0.5.21 and later ("new"). It dies where SGLang dies, warns
where SGLang only warns, and does faults that a test orders.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.rollouts.sglang.contract_weights import Broken, Weights, read_bucket

FIELDS = json.loads((Path(__file__).parent / "fields.json").read_text())
CLASSES = {
    "/generate": "GenerateReqInput",
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/flush_cache": "FlushCacheReqInput",
    "/release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "/resume_memory_occupation": "ResumeMemoryOccupationReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "/update_weight_version": "UpdateWeightVersionReqInput",
    "/weights_checker": "CheckWeightsReqInput",
    "/abort_request": "AbortReq",
}
TAGS = ("kv_cache", "weights", "cuda_graph")
# tokens, log_probs of a continuation: (weights, ids, sampling_params, rid, position of the next token)
Engine = Callable[[Weights, list[int], dict[str, Any], str], tuple[int, float]]


@dataclass
class Fault:
    """`kind` happens at the next call of `path` behind `skip` calls of it."""

    path: str
    kind: str
    skip: int = 0


@dataclass
class Running:
    """A request that is computed."""

    is_aborted: threading.Event = field(default_factory=threading.Event)


class Died(Exception):
    """The scheduler has ended the server."""


class ContractServer(ThreadingHTTPServer):
    """`calls` are all that was asked: path and body, in order. `token_seconds` is how long a token takes."""

    daemon_threads = True
    allow_reuse_address = True
    block_on_close = False

    def __init__(
        self,
        weights: Weights,
        engine: Engine,
        *,
        protocol: str = "old",
        keys: Any = None,
        port: int = 0,
        info: Mapping[str, Any] | None = None,
        faults: list[Fault] | None = None,
        calls: list[tuple[str, dict[str, Any]]] | None = None,
    ) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.weights, self.engine, self.protocol = weights, engine, protocol
        self.keys: Any
        self.keys, self.info = keys or SimpleNamespace(api="", admin=""), dict(info or {})
        self.faults = faults if faults is not None else []
        self.calls = calls if calls is not None else []
        self.version = "default"
        self.token_seconds = 0.0
        self.is_dead = threading.Event()
        self.lines: list[str] = [f"server_args=ServerArgs(api_key={self.keys.api!r})"]
        self.running: set[int] = set()
        self.requests: dict[int, Running] = {}
        self.condition = threading.Condition()
        self.is_paused = False
        self.offloaded: set[str] = set()
        self.cache: dict[tuple[int, ...], Weights] = {}
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def die(self, reason: str) -> None:
        """End: the port closes, open connections are cut."""
        self.lines.append(reason)
        self.is_dead.set()
        with self.condition:
            self.condition.notify_all()
        threading.Thread(target=self._close, daemon=True).start()

    def _close(self) -> None:
        self.shutdown()
        self.server_close()

    def take_fault(self, path: str) -> str | None:
        for fault in self.faults:
            if fault.path == path:
                if fault.skip:
                    fault.skip -= 1
                    return None
                self.faults.remove(fault)
                return fault.kind
        return None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is nothing to tell of."""

    # What the routes do: status and document.

    def generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self.condition:
            while self.is_paused and not self.is_dead.is_set():
                self.condition.wait()
            if "kv_cache" in self.offloaded:
                raise Died("CUDA error: memory of the KV cache is not there")
            number, running = id(body), Running()
            self.requests[number] = running
        params, prompt = body["sampling_params"], list(body["input_ids"])
        ids: list[int] = []
        pairs: list[list[Any]] = []
        reason = "length"
        try:
            for _ in range(params["max_new_tokens"]):
                if self.token_seconds:
                    running.is_aborted.wait(self.token_seconds)
                if self.is_dead.is_set():
                    raise Died("dead")
                if running.is_aborted.is_set():
                    reason = "abort"
                    break
                # The prefix cache: keys and values of old weights answer for prompts that begin alike.
                weights = self.cache.setdefault(tuple(prompt), self.weights.copy())
                token, log_prob = self.engine(weights, prompt + ids, params, body["rid"])
                ids.append(token)
                pairs.append([log_prob, token, None])
                if not params["ignore_eos"] and token in params["stop_token_ids"]:
                    reason = "stop"
                    break
        finally:
            with self.condition:
                del self.requests[number]
                self.condition.notify_all()
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": {"type": reason},
            "weight_version": self.version,
        }
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = pairs
        if self.protocol == "new":
            meta["weight_versions"] = [{"version": self.version, "start": 0, "end": len(ids)}]
        return 200, {"output_ids": ids, "meta_info": meta}

    def abort(self) -> None:
        for running in [*self.requests.values()]:
            running.is_aborted.set()

    def abort_request(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.abort()
        return 200, {}

    def pause_generation(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self.condition:
            self.is_paused = True
            while self.requests and not self.is_dead.is_set():
                self.abort()
                self.condition.wait(0.1)
        return 200, {"status": "ok"}

    def continue_generation(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self.condition:
            self.is_paused = False
            self.condition.notify_all()
        return 200, {"status": "ok"}

    def flush_cache(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.requests:
            return 400, "Flush cache failed."
        self.cache.clear()
        return 200, "Cache flushed."

    def release_memory_occupation(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.requests:
            raise Died("release_memory_occupation should be called only when server is idle.")
        for tag in body.get("tags") or TAGS:
            if tag in self.offloaded:  # seen with 0.5.16 and torch_memory_saver 0.0.9
                raise Died(f"Cannot pause allocation that is not active. tag={tag}")
            self.offloaded.add(tag)
        return 200, None

    def resume_memory_occupation(self, body: dict[str, Any]) -> tuple[int, Any]:
        for tag in body.get("tags") or TAGS:
            if tag not in self.offloaded:
                raise Died(f"KeyError: {tag}")
            self.offloaded.remove(tag)
        return 200, None

    def update_weights_from_disk(
        self, body: dict[str, Any], change: str | None = None, most: int | None = None
    ) -> tuple[int, Any]:
        if body.get("load_format") in (None, "dummy"):  # null is the load_format of the start
            return 400, {"success": False, "message": "Failed to get model loader"}
        directory = Path(body["model_path"])
        if not directory.is_dir():
            return 400, {"success": False, "message": "Failed to get weights iterator"}
        try:
            self.weights.load(directory, change, most)
        except Broken as error:
            # The way back reads the new directory once more, in all releases, and fails as the first time.
            raise Died(f"Rolling back to original weights. {error}") from error
        if body.get("flush_cache", True):
            if self.requests and self.protocol == "old":
                raise Died("Cache flush failed after updating weights")
            if self.requests:
                return 400, {"success": False, "message": "the cache was not flushed"}
            self.cache.clear()
        if body.get("weight_version") is not None:
            self.version = body["weight_version"]
        return 200, {"success": True, "message": "Succeeded to update model weights."}

    def update_weights_from_tensor(
        self, body: dict[str, Any], change: str | None = None, most: int | None = None
    ) -> tuple[int, Any]:
        if body.get("load_format") != "flattened_bucket":  # null loads (name, tensor), of which none is here
            return 400, {"success": False, "message": "too many values to unpack"}
        for payload in body["serialized_named_tensors"][:1]:  # of rank 0, the only one
            try:
                self.weights.load_entries(read_bucket(payload), change, most)
            except Broken as error:  # nothing goes back: what was loaded stays
                return 400, {"success": False, "message": str(error)}
        if body.get("flush_cache", True):
            if self.requests:
                raise Died("Cache flush failed after updating weights")
            self.cache.clear()
        return 200, {"success": True, "message": "Success"}

    def update_weight_version(self, body: dict[str, Any]) -> tuple[int, Any]:
        if body.get("abort_all_requests", True):
            self.abort()
        self.version = body["new_version"]
        return 200, {"success": True}

    def weights_checker(self, body: dict[str, Any]) -> tuple[int, Any]:
        document: dict[str, Any] = {"success": True, "message": "Success."}
        if body["action"] == "reset_tensors":
            self.weights.reset()
        else:
            document["ranks"] = [{"checksums": self.weights.compute_checksums(), "per_gpu_checksum": "0"}]
        return 200, document

    def health_generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self.condition:
            if self.is_paused:  # the token that it asks for waits
                self.condition.wait(20)
        return (503, "") if self.is_paused or self.offloaded else (200, "")

    def model_info(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"weight_version": self.version, "model_path": self.info.get("model_path")}

    def server_info(self, body: dict[str, Any]) -> tuple[int, Any]:
        secrets = {"api_key": self.keys.api, "admin_api_key": self.keys.admin}
        draft = "EAGLE" if self.weights.draft else None
        return 200, {"version": self.protocol, "speculative_algorithm": draft, **secrets, **self.info}


class Handler(BaseHTTPRequestHandler):
    server: ContractServer

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: `calls` has it."""

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self._answer(json.loads(self.rfile.read(length) or b"{}"))

    def _find_status(self, body: dict[str, Any]) -> int:
        """401 for a wrong key, 404 or 405 for no route, 422 for a field that this release does not know."""
        path, server = self.path, self.server
        if path == "/begin_weight_update":
            return 404 if server.protocol == "old" else 405
        if not hasattr(server, path[1:]):
            return 404  # /get_weight_version, too
        is_normal = path in ("/generate", "/model_info", "/server_info", "/abort_request")
        key = server.keys.api if is_normal else server.keys.admin
        is_open = path == "/health_generate" or not key
        if not is_open and self.headers.get("Authorization") != f"Bearer {key}":
            return 401
        if path in CLASSES:
            known = FIELDS["0.5.16" if server.protocol == "old" else "0.5.21"][CLASSES[path]]
            if not {*body} <= {*known}:
                return 422
        return 200

    def _answer(self, body: dict[str, Any]) -> None:
        server, path = self.server, self.path
        if server.is_dead.is_set():
            return None
        server.calls.append((path, body))
        status = self._find_status(body)
        fault = server.take_fault(path)
        if status != 200:
            return self._reply(status, {"error": "refused"})
        if fault in ("before", "hang"):
            if fault == "hang":
                server.is_dead.wait(30)
            return None
        if fault == "kill":
            return server.die("Killed")
        if fault in ("401", "500"):
            return self._reply(int(fault), {"error": fault})
        if fault == "nonsense":
            return self._reply(200, "\x00 nonsense {")
        try:
            status, document = self._act(path, body, fault)
        except Died as error:
            return server.die(str(error))
        if fault == "400":
            return self._reply(400, {"success": False, "message": "partially updated. Discard the weights."})
        if fault == "after":
            return None
        if fault == "digest":
            checksums = document["ranks"][0]["checksums"]
            checksums[sorted(checksums)[0]] = "0" * 16
        if fault in MANGLED:
            MANGLED[fault](document)
        return self._reply(status, document, is_cut=fault == "during")

    def _act(self, path: str, body: dict[str, Any], fault: str | None) -> tuple[int, Any]:
        server = self.server
        if path not in ("/update_weights_from_disk", "/update_weights_from_tensor"):
            route: Callable[[dict[str, Any]], tuple[int, Any]] = getattr(server, path[1:])
            return route(body)
        if fault == "truncated" and "model_path" in body:
            first = sorted(Path(body["model_path"]).glob("*.safetensors"))[0]
            first.write_bytes(first.read_bytes()[:-1])
        most = len(server.weights.kinds) // 2 if fault in ("400", "during") else None
        update: Callable[..., tuple[int, Any]] = getattr(server, path[1:])
        return update(body, fault if fault in ("lost", "doubled", "swapped") else None, most)

    def _reply(self, status: int, document: Any, *, is_cut: bool = False) -> None:
        data = (document if isinstance(document, str) else json.dumps(document)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if is_cut else data)


def _shorten(document: Any) -> None:
    document["meta_info"]["output_token_logprobs"].pop()


def _drop(document: Any) -> None:
    del document["meta_info"]["output_token_logprobs"]


def _leave_vocabulary(document: Any) -> None:
    document["output_ids"][0] = document["meta_info"]["output_token_logprobs"][0][1] = 10**6


def _break_number(document: Any) -> None:
    document["meta_info"]["output_token_logprobs"][0][0] = float("nan")


def _name_old_version(document: Any) -> None:
    document["meta_info"]["weight_version"] = "default"
    document["meta_info"].pop("weight_versions", None)


def _mix_versions(document: Any) -> None:
    meta = document["meta_info"]
    meta["weight_versions"] = [{"version": "0"}, {"version": meta["weight_version"]}]


def _end_early(document: Any) -> None:
    document["output_ids"].pop()
    document["meta_info"]["output_token_logprobs"].pop()


# What a server may make of an answer.
MANGLED: dict[str, Callable[[Any], None]] = {
    "short log-probs": _shorten,
    "no log-probs": _drop,
    "foreign token": _leave_vocabulary,
    "nan": _break_number,
    "old version": _name_old_version,
    "mixed versions": _mix_versions,
    "too short": _end_early,
}


def wait_until(is_true: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.002)
