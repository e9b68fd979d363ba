"""A docker engine with BuildKit: the machine's own, or a private one that lives as long as the tests."""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bundle.launch.orphans import prepare_parent_death_signal
from tests.images import tools
from tests.images.tools import CACHE, Missing

# The containerd store would hold attestations too, but compresses and unpacks every image: minutes.
# The build cache outlives the tests, up to a limit.
_CONFIGURATION = {
    "features": {"containerd-snapshotter": False},
    "builder": {"gc": {"enabled": True, "defaultKeepStorage": "15GB"}},
}


@dataclass(frozen=True)
class Result:
    """How a docker command ended."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Engine:
    """Docker commands for one engine; a `private` one has no bridge that builds could use."""

    environment: Mapping[str, str]
    private: bool

    def attempt(self, *words: str, seconds: float = 120) -> Result:
        """Returns how `docker words` ended, whatever it ended with."""
        done = subprocess.run(
            ["docker", *words], env=self.environment, capture_output=True, text=True, timeout=seconds
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def docker(self, *words: str, seconds: float = 120) -> str:
        """Returns what `docker words` printed; fails with its errors."""
        result = self.attempt(*words, seconds=seconds)
        assert result.code == 0, f"docker {' '.join(words[:3])}:\n{result.out[-2000:]}\n{result.err[-6000:]}"
        return result.out


@contextmanager
def engine() -> Iterator[Engine]:
    """Yields an engine; raises Missing where there is none and none can be made."""
    own = Engine(os.environ, private=False)
    if _answers(own):
        yield own
        return
    if os.geteuid() != 0:
        raise Missing("a docker engine with buildx, or root to start a private one")
    programs = tools.unpacked()
    # Not below the cache: the path of a socket may have 107 characters, and containerd makes long ones.
    with tempfile.TemporaryDirectory(prefix="engine-") as name:
        yield from _private(programs, Path(name))


def _private(programs: Path, folder: Path) -> Iterator[Engine]:
    plugins = folder / "client" / "cli-plugins"
    plugins.mkdir(parents=True)
    (plugins / "docker-buildx").symlink_to(programs / "usr/libexec/docker/cli-plugins/docker-buildx")
    configuration = folder / "daemon.json"
    configuration.write_text(json.dumps(_CONFIGURATION))
    path = f"{programs}/usr/bin:{programs}/usr/sbin:{os.environ['PATH']}"
    socket = f"unix://{folder}/engine.sock"
    variables = {"PATH": path, "DOCKER_HOST": socket, "DOCKER_CONFIG": str(folder / "client")}
    (libraries,) = (programs / "usr/lib").glob("*-linux-gnu*")
    own = {"LD_LIBRARY_PATH": str(libraries), "XTABLES_LIBDIR": str(libraries / "xtables")}
    command = [
        *("dockerd", "--host", socket, "--config-file", str(configuration)),
        *("--data-root", str(CACHE / "engine"), "--exec-root", str(folder / "exec")),
        *("--pidfile", str(folder / "pid"), "--bridge", "none", "--iptables=false", "--ip6tables=false"),
    ]
    log = CACHE / "engine.log"
    with log.open("wb") as output:
        daemon = subprocess.Popen(
            command,
            env=os.environ | variables | own,
            stdout=output,
            stderr=output,
            preexec_fn=prepare_parent_death_signal(signal.SIGTERM),  # when the tests are killed
        )
    try:
        made = Engine({**os.environ, **variables}, private=True)
        deadline = time.monotonic() + 60
        while not _answers(made):
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise Missing(f"a docker engine: the private one did not start: {log.read_text()[-500:]}")
            time.sleep(0.2)
        yield made
    finally:
        daemon.terminate()
        daemon.wait(timeout=60)


def _answers(engine: Engine) -> bool:
    try:
        return engine.attempt("info", seconds=20).code == 0 == engine.attempt("buildx", "version").code
    except (OSError, subprocess.TimeoutExpired):
        return False
