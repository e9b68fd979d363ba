"""A recorder in the place of an API server: keeps what is made, answers what it was told; it is no cluster.

Nothing is scheduled, admitted or validated here: pods, statuses and refusals are the test's own.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit


class Request(NamedTuple):
    method: str
    path: str
    query: dict[str, str]
    body: Any


class Recorder:
    """`statuses` of the workload and lists of `pods` are given one after the other, the last for ever."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.objects: dict[str, dict[str, Any]] = {}
        self.refusals: dict[str, tuple[int, str]] = {}  # by the end of a path: of what is made
        self.statuses: list[dict[str, Any]] = [{}]
        self.pods: list[list[dict[str, Any]]] = [[]]
        self.logs: dict[str, str] = {}

    def answer(self, asked: Request) -> tuple[int, Any]:
        """The status and the body of an answer: text is a log's."""
        self.requests.append(asked)
        collection, _, name = asked.path.rpartition("/")
        if asked.method == "POST":
            return self._make(asked)
        if name == "log":
            return 200, self.logs.get(collection.rpartition("/")[2], "")
        if name == "pods":
            return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": later(self.pods)}
        if asked.path not in self.objects:
            return 404, failure(404, f"{name} not found")
        if asked.method == "DELETE":
            return 200, self.objects.pop(asked.path)
        if asked.method == "PATCH":
            self.objects[asked.path]["metadata"] |= asked.body["metadata"]
            return 200, self.objects[asked.path]
        return 200, self.objects[asked.path] | {"status": later(self.statuses)}

    def _make(self, asked: Request) -> tuple[int, Any]:
        path = f"{asked.path}/{asked.body['metadata']['name']}"
        for end, (code, said) in self.refusals.items():
            if asked.path.endswith(end):
                return code, failure(code, said)
        if path in self.objects:
            return 409, failure(409, "already exists")
        made = asked.body | {"metadata": asked.body["metadata"] | {"uid": f"uid-of-{len(self.requests)}"}}
        if asked.query.get("dryRun") != "All":
            self.objects[path] = made
        return 201, made

    def made(self) -> list[Request]:
        """What was really made, in that order."""
        return [each for each in self.requests if each.method == "POST" and "dryRun" not in each.query]


def later(answers: list[Any]) -> Any:
    """The next of some answers; the last stays."""
    return answers.pop(0) if len(answers) > 1 else answers[0]


def failure(code: int, message: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message}


def pod(
    name: str, phase: str, code: int | None = None, finished: str = "2026-01-01T00:00:00Z", waits: str = ""
) -> dict[str, Any]:
    """A pod as an API server lists it."""
    state: dict[str, Any] = {"running": {}}
    if code is not None:
        state = {"terminated": {"exitCode": code, "finishedAt": finished}}
    status: dict[str, Any] = {"phase": phase}
    if phase == "Pending":
        status["conditions"] = [{"type": "PodScheduled", "status": "False", "message": waits}]
    else:
        blank = {"name": "node", "image": "i", "imageID": "i", "ready": True, "restartCount": 0}
        status["containerStatuses"] = [blank | {"state": state}]
    return {"metadata": {"name": name, "uid": f"uid-{name}"}, "status": status}


@contextmanager
def listening(recorder: Recorder) -> Iterator[str]:
    """The address at which the recorder answers."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            parts = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            asked = Request(self.command, parts.path, query, json.loads(body) if body else None)
            code, said = recorder.answer(asked)
            text = isinstance(said, str)
            content = (said if text else json.dumps(said)).encode()
            self.send_response(code)
            self.send_header("Content-Type", "text/plain" if text else "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PATCH = do_DELETE = answer

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
