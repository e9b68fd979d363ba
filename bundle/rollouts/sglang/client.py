"""Speaks HTTP with one server. Every call ends within its time limit, whatever the server sends."""

import asyncio
import http.client
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bundle import files
from bundle.errors import JobFailed
from bundle.recipe.rl_rules import split_host_port_url
from bundle.rollouts.sglang.protocol import (
    CheckWeights,
    ContinueGeneration,
    FlushCache,
    HealthGenerate,
    ModelInfo,
    PauseGeneration,
    ProbeUpdateSessions,
    ReleaseMemory,
    ResumeMemory,
    ServerInfo,
    ServerRequest,
    UpdateFromDisk,
    UpdateFromTensor,
    UpdateVersion,
    read_checksums,
)
from bundle.weight_sync.transports.ipc import Bucket

_MAX_REPLY_BYTES = 2**28


class ServerCallFailed(JobFailed):
    """A server that cannot be reached in time, or answers another status than expected."""


@dataclass(frozen=True, slots=True)
class Keys:
    """What opens a server: `api` to generate, `admin` for weights and memory. Never shown."""

    api: str = field(default="", repr=False)
    admin: str = field(default="", repr=False)

    def hide(self, text: str) -> str:
        """Return the text without the keys."""
        for key in filter(None, (self.api, self.admin)):
            text = text.replace(key, "***")
        return text


class Client:
    """One server. All calls raise ServerCallFailed where the server does not do what it is asked.

    It is a replica that somebody else has started (`weight_sync.states.Replica`).
    """

    can_restart = False

    def __init__(self, url: str, keys: Keys, seconds: float, ranks: int = 1) -> None:
        """`seconds` limit a call, from the connection to the last byte; the server has so many `ranks`."""
        self._keys, self._seconds, self._ranks = keys, seconds, ranks
        self.set_address(url)

    def set_address(self, url: str) -> None:
        """Use the server at this address from now on. Raise ValueError for an invalid address."""
        self._host, self._port = split_host_port_url(url)
        self.name = f"{self._host}:{self._port}"
        self._has_sessions: bool | None = None

    async def exchange(self, route: ServerRequest, seconds: float | None = None) -> tuple[int, bytes]:
        """Return status and body of the reply to a request."""
        try:
            async with asyncio.timeout(seconds or self._seconds):
                return await self._exchange(route)
        except TimeoutError as error:
            raise ServerCallFailed(f"{route.path} took more than {seconds or self._seconds:g} s.") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = self._keys.hide(str(error)) or type(error).__name__
            raise ServerCallFailed(f"{route.path} got no reply ({reason}).") from error

    async def _exchange(self, route: ServerRequest) -> tuple[int, bytes]:
        body = json.dumps(route.to_body()).encode() if route.method == "POST" else b""
        head = [f"{route.method} {route.path} HTTP/1.1", f"Host: {self.name}", "Connection: close"]
        head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        key = {"api": self._keys.api, "admin": self._keys.admin, None: ""}[route.key]
        if key:
            head.append(f"Authorization: Bearer {key}")
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write("\r\n".join([*head, "", ""]).encode() + body)
            await writer.drain()
            data = bytearray()
            while chunk := await reader.read(2**16):
                data += chunk
                if len(data) > _MAX_REPLY_BYTES:
                    raise ValueError(f"more than {_MAX_REPLY_BYTES} bytes")
        finally:
            writer.close()
        reply = http.client.HTTPResponse(_BytesSocket(bytes(data)))  # type: ignore[arg-type]
        reply.begin()
        return reply.status, reply.read()

    async def request(self, route: ServerRequest, seconds: float | None = None) -> Any:
        """Return the JSON of a reply, or its text. Raise ServerCallFailed for any status but 200."""
        status, body = await self.exchange(route, seconds)
        text = body.decode(errors="replace")
        if status != 200:
            reason = files.to_printable(self._keys.hide(text)[:300])
            raise ServerCallFailed(f"{route.path} returned status {status} ({reason}).")
        try:
            return json.loads(text)
        except ValueError:
            return text

    def request_blocking(self, route: ServerRequest, seconds: float | None = None) -> Any:
        """Return what `request` returns."""
        return asyncio.run(self.request(route, seconds))

    def is_healthy(self, seconds: float) -> bool:
        """Return whether the server generates. Not to be asked while it is paused: it would wait."""
        try:
            self.request_blocking(HealthGenerate(), seconds)
        except ServerCallFailed:
            return False
        return True

    def read_info(self) -> dict[str, Any]:
        """Return what the server says of itself and its model."""
        info: dict[str, Any] = {}
        for route in (ServerInfo(), ModelInfo()):
            document = self.request_blocking(route)
            if not isinstance(document, dict):
                raise ServerCallFailed(f"{route.path} returned no JSON object. Is it SGLang?")
            info |= document
        return info

    def has_update_sessions(self) -> bool:
        """Return whether updates of weights run in sessions: the protocol since 0.5.21."""
        if self._has_sessions is None:
            status, _ = asyncio.run(self.exchange(ProbeUpdateSessions()))
            if status not in (404, 405):
                raise ServerCallFailed(f"{ProbeUpdateSessions.path} returned status {status}. Is it SGLang?")
            self._has_sessions = status == 405
        return self._has_sessions

    def is_alive(self) -> bool:
        """Return whether it answers at all; a server that is paused does."""
        try:
            self.read_weight_version()
        except ServerCallFailed:
            return False
        return True

    def restart(self) -> None:
        raise ServerCallFailed("it does not answer, and this job did not start it. Start it again.")

    def stop_owned_server(self) -> None:
        """Do nothing: the server is somebody else's."""

    # The steps of a sync.

    def abort_and_pause(self) -> None:
        self._call_checked(PauseGeneration(), "status", "ok")

    def flush(self) -> None:
        self.request_blocking(FlushCache())

    def release(self, tag: str) -> None:
        self.request_blocking(ReleaseMemory([tag]))

    def resume(self, tag: str) -> None:
        self.request_blocking(ResumeMemory([tag]))

    def load(self, directory: Path) -> None:
        self._call_checked(UpdateFromDisk(str(directory)))

    def load_bucket(self, bucket: Bucket) -> None:
        self._call_checked(UpdateFromTensor([bucket.share() for _ in range(self._ranks)]))

    def read_checksums(self) -> Any:
        return read_checksums(self._post_weights_check("checksum"))

    def reset_tensors(self) -> None:
        self._post_weights_check("reset_tensors")

    def set_version(self, version: str) -> None:
        self._call_checked(UpdateVersion(version))

    def read_weight_version(self) -> str:
        reply = self.request_blocking(ModelInfo())
        return str(reply.get("weight_version") if isinstance(reply, dict) else reply)

    def unpause(self) -> None:
        self._call_checked(ContinueGeneration(), "status", "ok")

    def _post_weights_check(self, action: Any) -> Any:
        return self._call_checked(CheckWeights(action, "all" if self.has_update_sessions() else None))

    def _call_checked(self, route: ServerRequest, key: str = "success", value: object = True) -> Any:
        """Return the reply. Raise ServerCallFailed where it does not say that it has succeeded."""
        reply = self.request_blocking(route)
        if not isinstance(reply, dict) or reply.get(key) != value:
            raise ServerCallFailed(f"{route.path} failed ({self._keys.hide(str(reply))[:300]}).")
        return reply


class _BytesSocket:
    """Bytes that `http.client` reads a reply from."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)
