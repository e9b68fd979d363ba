"""The reward http, by a real server: its rewards are taken, and all else that it does is counted, never 0."""

import base64
import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from bundle.recipe.rl import RLReward
from bundle.rewards import RewardPool
from bundle.rewards.http import MAX_REPLY_BYTES, is_loopback

pytestmark = pytest.mark.processes
SECONDS = 1.5
# What an interpreter takes to start on a busy machine.
SLACK = 15.0


class Server(ThreadingHTTPServer):
    """Replies as `reply` says, which gets the handler and the request; it notes every request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.reply: Callable[[Handler, Any], None] = reply_with_lengths
        self.is_over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/judge"


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, dict(self.headers), request))
        self.server.reply(self, request)

    def answer(
        self, content: bytes, status: int = 200, length: int | None = None, location: str | None = None
    ) -> None:
        self.send_response(status)
        headers = {"Content-Length": str(len(content) if length is None else length)}
        for name, value in (headers | ({"Location": location} if location else {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Write nothing."""


def reply_with_lengths(handler: Handler, request: Any) -> None:
    handler.answer(json.dumps({"rewards": [float(len(answer)) for answer in request["answers"]]}).encode())


def reply_with(text: str | bytes, status: int = 200, **keys: Any) -> Callable[[Handler, Any], None]:
    content = text if isinstance(text, bytes) else text.encode()
    return lambda handler, request: handler.answer(content, status, **keys)


def be_silent(handler: Handler, request: Any) -> None:
    handler.server.is_over.wait(60)


def drip(handler: Handler, request: Any) -> None:
    """Send a byte of the headers at a time: no single wait is long."""
    while not handler.server.is_over.wait(0.1):
        handler.wfile.write(b"H")


def drip_body(handler: Handler, request: Any) -> None:
    handler.send_response(200)
    handler.end_headers()
    while not handler.server.is_over.wait(0.1):
        handler.wfile.write(b" ")
        handler.wfile.flush()


def cut(handler: Handler, request: Any) -> None:
    handler.connection.close()


def cut_body(handler: Handler, request: Any) -> None:
    handler.answer(b'{"rewards": [1', 200, 1000)


def send_without_end(handler: Handler, request: Any) -> None:
    handler.send_response(200)
    handler.end_headers()
    while not handler.server.is_over.is_set():
        try:
            handler.wfile.write(b" " * 2**20)
        except OSError:
            return


@pytest.fixture
def server() -> Iterator[Server]:
    opened = Server()
    thread = threading.Thread(target=opened.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield opened
    finally:
        opened.is_over.set()
        opened.shutdown()
        opened.server_close()


def reward(server: Server, **keys) -> RLReward:
    return RLReward.model_validate({"kind": "http", "timeout_seconds": SECONDS, "url": server.url, **keys})


@pytest.mark.parametrize("processes", [1, 3])
def test_answers_and_rows_are_posted_and_rewards_taken(server, processes):
    answers = ["a", "bb\n", "é\u2028", "", "x" * 10_000]
    rows = [{"n": n, "deep": {"list": [n, None, "ü"]}} for n in range(5)]
    with RewardPool([reward(server, weight=0.5, processes=processes)]) as pool:
        for count in (5, 0, 1):
            judgement = pool.judge_all(answers[:count], rows[:count])
            assert judgement.rewards == [len(answer) / 2 for answer in answers[:count]]
            assert (judgement.failed, judgement.unjudged) == (0, 0)
    posted = [request for _, _, request in server.requests]
    pairs = [pair for one in posted for pair in zip(one["answers"], one["rows"], strict=True)]
    key = lambda pair: json.dumps(pair, sort_keys=True)  # noqa: E731
    expected = [*zip(answers, rows, strict=True), (answers[0], rows[0])]
    assert sorted(pairs, key=key) == sorted(expected, key=key)
    assert all(set(one) == {"answers", "rows"} for one in posted) and len(posted) == processes + 1
    assert {path for path, _, _ in server.requests} == {"/judge"}
    assert {headers["Content-Type"] for _, headers, _ in server.requests} == {"application/json"}


def test_null_leaves_an_answer_out_and_is_no_failure(server):
    server.reply = reply_with('{"rewards": [1, null, true, -2.5], "more": "text"}')
    with RewardPool([reward(server)]) as pool:
        judgement = pool.judge_all(["a"] * 4, [{}] * 4)
    assert np.array_equal(judgement.rewards, [1, math.nan, 1, -2.5], equal_nan=True)
    assert (judgement.failed, judgement.unjudged) == (0, 1)


# (what the server does, kind of failure, failures of three answers, what the reason names)
FAILURES = {
    "few": (reply_with('{"rewards": [1, 2]}'), "wrong_count", 3, "2 rewards for 3"),
    "many": (reply_with('{"rewards": [1, 2, 3, 4]}'), "wrong_count", 3, "more"),
    "no_list": (reply_with('{"rewards": 3}'), "wrong_count", 3, "int"),
    "an_object": (reply_with('{"rewards": {"a": 1, "b": 2, "c": 3}}'), "wrong_count", 3, "dict"),
    "one_text": (reply_with('{"rewards": "111"}'), "wrong_count", 3, "str"),
    "texts": (reply_with('{"rewards": [1, "1", 1]}'), "text", 1, "'1'"),
    "nan": (reply_with('{"rewards": [1, NaN, 1]}'), "not_a_number", 1, "nan"),
    "infinity": (reply_with('{"rewards": [1, -Infinity, 1]}'), "not_a_number", 1, "-inf"),
    "overflow": (reply_with('{"rewards": [1, 1e999, 1]}'), "not_a_number", 1, "inf"),
    "lists": (reply_with('{"rewards": [1, [1], 1]}'), "not_a_number", 1, "list"),
    "empty": (reply_with(""), "raised", 3, "JSON"),
    "plain_text": (reply_with("1 1 1"), "raised", 3, "JSON"),
    "no_text": (reply_with(b"\xff\xfe\x00"), "raised", 3, "JSON"),
    "deep": (reply_with("[" * 100_000), "raised", 3, "nested"),
    "another_object": (reply_with('{"scores": [1, 1, 1]}'), "raised", 3, '"rewards"'),
    "bare_list": (reply_with("[1, 1, 1]"), "raised", 3, '"rewards"'),
    "large": (reply_with(b" " * MAX_REPLY_BYTES + b"{}"), "raised", 3, str(MAX_REPLY_BYTES)),
    "without_end": (send_without_end, "raised", 3, str(MAX_REPLY_BYTES)),
    "status_500": (reply_with('{"rewards": [1, 1, 1]}', 500), "raised", 3, "500"),
    "status_503": (reply_with("", 503), "raised", 3, "503"),
    "status_404": (reply_with('{"rewards": [1, 1, 1]}', 404), "raised", 3, "404"),
    "status_422": (reply_with("", 422), "raised", 3, "422"),
    "no_content": (reply_with("", 204), "raised", 3, "JSON"),
    "cut": (cut, "raised", 3, "without a reply"),
    "cut_body": (cut_body, "raised", 3, "986"),
    "no_http": (lambda handler, request: handler.wfile.write(b"SSH-2.0\r\n"), "raised", 3, "SSH-2.0"),
    "silent": (be_silent, "timed_out", 3, "1.5"),
    "slow": (drip, "timed_out", 3, "1.5"),
    "slow_body": (drip_body, "timed_out", 3, "1.5"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_each_failure_is_counted_by_kind_and_is_never_0(server, name, messages):
    server.reply, kind, count, value = FAILURES[name]
    begin = time.monotonic()
    with RewardPool([reward(server)]) as pool:
        judgement = pool.judge_all(["a"] * 3, [{}] * 3)
        assert time.monotonic() - begin < SECONDS + SLACK
        assert judgement.failures == {("http", kind): count} and judgement.failed == count
        assert [math.isnan(number) for number in judgement.rewards].count(True) == count
        reason = str(judgement.first_reason)
        assert value in reason and "http" in reason
        messages(reason)
        if kind == "timed_out":
            server.reply = reply_with_lengths
            assert pool.judge_all(["a"] * 3, [{}] * 3).rewards == [1] * 3


def test_a_server_that_is_gone_is_a_failure(server):
    url = server.url
    server.shutdown()
    server.server_close()
    with RewardPool([RLReward(kind="http", url=url, timeout_seconds=SECONDS)]) as pool:
        judgement = pool.judge_all(["a"], [{}])
    assert judgement.failures == {("http", "raised"): 1} and "refused" in str(judgement.first_reason)


@pytest.mark.parametrize("fault", [reply_with("", 503), reply_with("", 500), cut, cut_body])
def test_a_passing_fault_is_tried_again(server, fault):
    def fail_twice(handler, request):
        (fault if len(server.requests) <= 2 else reply_with_lengths)(handler, request)

    server.reply = fail_twice
    with RewardPool([reward(server, timeout_seconds=20.0)]) as pool:
        assert pool.judge_all(["abc"], [{}]).rewards == [3]
    assert len(server.requests) == 3 and all(one == server.requests[0] for one in server.requests)


def test_attempts_end_with_the_time_out_and_wait_longer_each_time(server):
    times = []

    def note(handler, request):
        times.append(time.monotonic())
        handler.answer(b"", 500)

    server.reply = note
    with RewardPool([reward(server, timeout_seconds=3.0)]) as pool:
        begin = time.monotonic()
        assert pool.judge_all(["abc"], [{}]).failed == 1
        assert time.monotonic() - begin <= 3.5
    gaps = np.diff(times)
    assert 3 <= len(times) <= 5 and all(later > 1.3 * gap for gap, later in itertools.pairwise(gaps))


@pytest.mark.parametrize("status", [404, 422, 400, 302, 307])
def test_what_another_attempt_cannot_change_is_asked_once(server, status):
    server.reply = reply_with("", status, location="/elsewhere")
    with RewardPool([reward(server)]) as pool:
        assert pool.judge_all(["abc"], [{}]).failed == 1
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(server, status):
    other = Server()
    thread = threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        for location in (other.url, "/judge/"):
            server.reply = reply_with("", status, location=location)
            with RewardPool([reward(server)]) as pool:
                judgement = pool.judge_all(["abc"], [{}])
            assert judgement.failures == {("http", "raised"): 1}
            assert str(status) in str(judgement.first_reason)
        assert len(server.requests) == 2 and other.requests == []
    finally:
        other.shutdown()
        other.server_close()


@pytest.mark.parametrize("value", [b"bytes", math.nan, {1, 2}])
def test_a_row_that_json_cannot_hold_is_a_failure(server, value, messages):
    with RewardPool([reward(server)]) as pool:
        judgement = pool.judge_all(["a"], [{"value": value}])
        assert judgement.failures == {("http", "raised"): 1} and server.requests == []
        messages(judgement.first_reason)


def test_a_login_of_the_url_is_sent_and_no_message_has_it(server):
    server.reply = reply_with("", 401)
    url = server.url.replace("//", "//us%40er:pass%3Aword@") + "?key=hidden"
    with RewardPool([reward(server, url=url)]) as pool:
        judgement = pool.judge_all(["a"], [{}])
    path, headers, _ = server.requests[0]
    assert base64.b64decode(headers["Authorization"].removeprefix("Basic ")) == b"us@er:pass:word"
    assert path == "/judge?key=hidden" and "@" not in headers["Host"]
    reason = str(judgement.first_reason)
    assert "401" in reason and not any(word in reason for word in ("us@er", "us%40er", "pass", "hidden"))


def test_loopback_needs_no_proxy_and_other_hosts_take_it(server, monkeypatch):
    proxy = server.url.rpartition("/")[0]
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, proxy)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with RewardPool([reward(server), reward(server, url="http://judge.invalid/")]) as pool:
        assert pool.judge_all(["abc"], [{}]).rewards == [6]
    assert {path for path, _, _ in server.requests} == {"/judge", "http://judge.invalid/"}


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *((host, True) for host in ("localhost", "a.localhost", "127.0.0.1", "127.8.8.8", "::1")),
        *((host, False) for host in ("10.0.0.1", "localhost.example", "example", "", "::2", "0.0.0.0")),
    ],
)
def test_loopback_addresses_are_this_machine(host, expected):
    assert is_loopback(host) is expected


def test_a_large_step_passes_through(server):
    answers, rows = ["x" * 10_000] * 300, [{"text": "y" * 10_000}] * 300
    with RewardPool([reward(server, timeout_seconds=30.0, processes=2)]) as pool:
        assert pool.judge_all(answers, rows).rewards == [10_000] * 300
