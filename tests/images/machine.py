"""What a build needs from this machine's pip: as secrets and a named context, so that no image holds it."""

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

_KEYS = ("index-url", "extra-index-url", "trusted-host", "proxy", "timeout", "default-timeout")
_CERTIFICATE = "/run/secrets/ca.pem"


@dataclass(frozen=True)
class Passed:
    """Files by the name of the secret that they become, and a folder of wheels, if pip is told of one."""

    secrets: dict[str, Path]
    wheelhouse: Path | None


def passed(folder: Path) -> Passed:
    """Returns what this machine's pip is told; writes what a build's pip is told to `folder`."""
    return derived(_configuration(), folder)


def derived(said: dict[str, str], folder: Path) -> Passed:
    """Returns what follows from `said`, pip's options by their names."""
    lines = [f"{key} = {value}" for key in _KEYS if (value := _served(said.get(key, "")))]
    secrets = {}
    if said.get("cert"):
        secrets["ca"] = Path(said["cert"])
        lines.append(f"cert = {_CERTIFICATE}")
    if lines:
        secrets["pip"] = folder / "pip.conf"
        secrets["pip"].write_text("\n".join(["[global]", *lines, ""]))
    places = [Path(urlsplit(place).path) for place in said.get("find-links", "").split()]
    return Passed(secrets, next((place for place in places if place.is_dir()), None))


def _served(value: str) -> str:
    """Returns the words of `value` that mean the same inside a build: no folders of this machine."""
    return " ".join(word for word in value.split() if not word.startswith(("file:", "/")))


def _configuration() -> dict[str, str]:
    """Returns the options of all pip's configuration files and variables, the stronger ones last."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    entries = [line.partition("=") for line in listing.splitlines()]
    found = [(*name.partition("."), value) for name, _, value in entries]
    found.sort(key=lambda entry: entry[0] == ":env:")
    return {key: str(ast.literal_eval(value)) for _, _, key, value in found}
