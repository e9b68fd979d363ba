"""A recorder in the place of an API server: keeps what is made, answers what it was told; it is no cluster.

Nothing is scheduled, admitted or validated here: pods, statuses and refusals are the test's own.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit


class Request(NamedTuple):
    method: str
    path: str
    query: dict[str, str]
    body: Any


class Cut(NamedTuple):
    """An answer of which so many characters come before the connection is lost."""

    text: str
    characters: int


LOST = 0, None  # the connection, without an answer
_OF_A_JOB = ("configmaps", "services", "clustertrainingruntimes")  # these have no status


class Recorder:
    """`statuses` of the workload and lists of `pods` are given one after the other, the last for ever."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.objects: dict[str, dict[str, Any]] = {}
        self.refusals: dict[str, tuple[int, str]] = {}  # by the end of a path: of what is made
        self.unlisted: dict[str, tuple[int, str]] = {}  # the same, of what is listed
        self.late: dict[str, tuple[int, str]] = {}  # the same, where a dry run is not refused
        # By method and end of a path, how often an answer is lost, and whether what was asked is done.
        self.lost: dict[tuple[str, str], tuple[int, bool]] = {}
        self.changes = 0
        self.statuses: list[dict[str, Any]] = [{}]
        self.pods: list[list[dict[str, Any]]] = [[]]
        # What each pod has written, a line every `tick` seconds since `began`; later answers after another.
        self.logs: dict[str, list[str]] = {}
        self.cuts: dict[str, list[int]] = {}  # by pod: of how many characters each answer is cut off
        self.began, self.tick = int(time.time()) - 600, 1.0

    def answer(self, asked: Request) -> tuple[int, Any]:
        """The status and the body of an answer: text is a log's."""
        self.requests.append(asked)
        for (method, end), (times, done) in self.lost.items():
            if times and asked.method == method and asked.path.endswith(end) and "dryRun" not in asked.query:
                self.lost[method, end] = (times - 1, done)
                if done:
                    self._answer(asked)
                return LOST
        return self._answer(asked)

    def _answer(self, asked: Request) -> tuple[int, Any]:
        collection, _, name = asked.path.rpartition("/")
        if asked.method == "POST":
            return self._make(asked)
        if name == "log":
            return 200, self._log(collection.rpartition("/")[2], asked.query)
        if name == "pods":
            return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": later(self.pods)}
        if "labelSelector" in asked.query:
            return self._list(asked)
        if asked.path not in self.objects:
            return 404, failure(404, f"{name} not found")
        metadata = self.objects[asked.path]["metadata"]
        if asked.method == "DELETE":
            if not asked.body["preconditions"].items() <= metadata.items():
                return 409, failure(409, "the precondition failed")
            return 200, self.objects.pop(asked.path)
        if asked.method == "PATCH":
            if asked.body["metadata"].pop("resourceVersion") != metadata["resourceVersion"]:
                return 409, failure(409, "the object has been modified")
            metadata |= asked.body["metadata"] | {"resourceVersion": self._version()}
            return 200, self.objects[asked.path]
        if collection.rpartition("/")[2] in _OF_A_JOB:
            return 200, self.objects[asked.path]
        return 200, self.objects[asked.path] | {"status": later(self.statuses)}

    def _list(self, asked: Request) -> tuple[int, Any]:
        if (refusal := self.unlisted.get(asked.path.rpartition("/")[2])) is not None:
            return refusal[0], failure(*refusal)
        label = dict([asked.query["labelSelector"].split("=")])
        return 200, {
            "items": [
                {"metadata": made["metadata"], "status": made.get("status", later(self.statuses))}
                for path, made in self.objects.items()
                if path.rpartition("/")[0] == asked.path
                and label.items() <= made["metadata"].get("labels", {}).items()
            ]
        }

    def _make(self, asked: Request) -> tuple[int, Any]:
        path = f"{asked.path}/{asked.body['metadata']['name']}"
        tried = asked.query.get("dryRun") == "All"
        for end, (code, said) in (self.refusals if tried else self.refusals | self.late).items():
            if asked.path.endswith(end):
                return code, failure(code, said)
        if path in self.objects:
            return 409, failure(409, "already exists")
        given = {"uid": f"uid-of-{len(self.requests)}", "resourceVersion": self._version()}
        made = asked.body | {"metadata": asked.body["metadata"] | given}
        if not tried:
            self.objects[path] = made
        return 201, made

    def _version(self) -> str:
        self.changes += 1
        return str(self.changes)

    def _log(self, pod: str, query: dict[str, str]) -> "str | Cut":
        """What a pod has written; with times as a kubelet writes them, each in another zone."""
        lines = later(self.logs.get(pod, [""])).splitlines(keepends=True)
        if "timestamps" in query:
            times = [self.began + number * self.tick for number in range(len(lines))]
            since = time.time() - int(query.get("sinceSeconds", 10**9))
            zones = [UTC, timezone(timedelta(hours=8))]
            lines = [
                f"{stamp(at, zones[number % 2])} {line}"
                for number, (at, line) in enumerate(zip(times, lines, strict=True))
                if at >= since
            ]
        text = "".join(lines)
        cuts = self.cuts.get(pod)
        return Cut(text, cuts.pop(0)) if cuts else text

    def made(self) -> list[Request]:
        """What was really made, in that order."""
        return [each for each in self.requests if each.method == "POST" and "dryRun" not in each.query]


def later(answers: list[Any]) -> Any:
    """The next of some answers; the last stays."""
    return answers.pop(0) if len(answers) > 1 else answers[0]


def stamp(at: float, zone: timezone) -> str:
    """A time as RFC 3339 has it, without the zeros at the end of its fraction."""
    text = datetime.fromtimestamp(at, zone).isoformat(timespec="microseconds")
    day, fraction = text[:19], text[20:26].rstrip("0")
    return day + (f".{fraction}" if fraction else "") + ("Z" if zone is UTC else text[26:])


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
            answer = recorder.answer(asked)
            if answer == LOST:
                self.close_connection = True
                return
            code, said = answer
            cut = said.characters if isinstance(said, Cut) else None
            said = said.text if isinstance(said, Cut) else said
            text = isinstance(said, str)
            content = (said if text else json.dumps(said)).encode()
            self.send_response(code)
            self.send_header("Content-Type", "text/plain" if text else "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[:cut])

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
