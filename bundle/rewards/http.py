"""The reward http: a server judges answers. The child of a reward loads this file by its path.

It imports nothing of this package. No message names the URL, which may hold credentials. There is no time-out
per request: the process is ended when the time of all attempts is over (`process.RewardProcess`).
"""

import base64
import ipaddress
import json
import time
from http.client import BadStatusLine, HTTPException, IncompleteRead, RemoteDisconnected
from typing import Any
from urllib.error import HTTPError
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import BaseHandler, HTTPRedirectHandler, ProxyHandler, Request, build_opener

MAX_REPLY_BYTES = 2**23
# Seconds before the second attempt; each further delay is twice as long.
FIRST_RETRY_DELAY = 0.25


class UnserializableRows(Exception):
    """Why rows are not sent."""

    is_explained = True


class NoUsableReply(Exception):
    """Why there is no reply of the server, or why it is not used."""

    is_explained = True


class NoRedirectHandler(HTTPRedirectHandler):
    """Follows no redirect: a server must not send the rows of a user to another one."""

    def redirect_request(self, *arguments: Any) -> None:
        """Return None: the redirect becomes an HTTPError."""


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine, which no proxy reaches."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def describe_connection_error(error: OSError | HTTPException) -> str:
    """Return why a request got no complete reply."""
    if isinstance(error, HTTPError):
        return f"the server answered with HTTP status {error.code} ({error.reason})"
    if isinstance(error, RemoteDisconnected):
        return "the server closed the connection without a reply"
    if isinstance(error, IncompleteRead):
        missing = f", but {error.expected} more were announced" if error.expected else ""
        return f"the reply of the server ended after {len(error.partial)} bytes{missing}"
    if isinstance(error, BadStatusLine):
        return f"the reply of the server is not HTTP (it begins with {str(error).strip()!r})"
    reason = getattr(error, "reason", error)
    return f"the connection to the server failed ({getattr(reason, 'strerror', None) or reason})"


class HttpReward:
    """Posts answers with their rows; connection errors and statuses from 500 on are tried again."""

    def __init__(self, url: str, timeout: float) -> None:
        """`url` may have `user:password@`; `timeout` [s] is of all attempts together."""
        parts = urlsplit(url)
        login, _, address = parts.netloc.rpartition("@")
        self._url = parts._replace(netloc=address).geturl()
        self._headers = {"Content-Type": "application/json"}
        if login:
            encoded = base64.b64encode(unquote_to_bytes(login)).decode()
            self._headers["Authorization"] = f"Basic {encoded}"
        handlers: list[BaseHandler] = [NoRedirectHandler()]
        if is_loopback(parts.hostname or ""):
            handlers.append(ProxyHandler({}))
        self._opener = build_opener(*handlers)
        self._timeout = timeout

    def judge(self, answers: list[str], rows: list[Any]) -> Any:
        """Return what the server says under "rewards".

        Raise UnserializableRows for rows that JSON cannot hold, NoUsableReply where no such reply comes.
        """
        try:
            body = json.dumps({"answers": answers, "rows": rows}, allow_nan=False).encode()
        except TypeError as error:
            raise UnserializableRows(
                f"a row of the data has a value that JSON cannot express ({error})"
            ) from None
        except ValueError:
            raise UnserializableRows(
                "a row of the data has NaN or infinity, which JSON cannot express"
            ) from None
        deadline, delay = time.monotonic() + self._timeout, FIRST_RETRY_DELAY
        while True:
            try:
                return self._request_rewards_once(body)
            except (OSError, HTTPException) as error:
                is_final = isinstance(error, HTTPError) and error.code < 500
                if is_final or time.monotonic() + delay >= deadline:
                    raise NoUsableReply(describe_connection_error(error)) from None
            time.sleep(delay)
            delay *= 2

    def _request_rewards_once(self, body: bytes) -> Any:
        request = Request(self._url, data=body, headers=self._headers, method="POST")
        with self._opener.open(request) as response:
            content = response.read(MAX_REPLY_BYTES + 1)
        if len(content) > MAX_REPLY_BYTES:
            raise NoUsableReply(f"the reply of the server has more than {MAX_REPLY_BYTES} bytes")
        if response.length:  # of what the headers promise; `read` does not compare
            raise IncompleteRead(content, response.length)
        try:
            reply = json.loads(content)
        except RecursionError:
            raise NoUsableReply("the reply of the server has too many nested lists or objects") from None
        except ValueError as error:
            raise NoUsableReply(f"the reply of the server is not JSON ({error})") from None
        if not isinstance(reply, dict) or "rewards" not in reply:
            raise NoUsableReply('the reply of the server is not a JSON object with the key "rewards"')
        return reply["rewards"]
