"""Bases for builds: the real one where a registry can be reached, else a Debian that stands in its place."""

import os
import shutil
import subprocess
from pathlib import Path

from tests.images import tools
from tests.images.engine import Engine
from tests.images.tools import CACHE, Missing
from tools.images.definition import Base


def image(engine: Engine, base: Base) -> tuple[str, str]:
    """Returns the name and the digest of what to build on in the place of `base`.

    A stand-in proves what a Dockerfile does, not what the real base has in it: no CUDA, no CANN.
    """
    if engine.attempt("pull", "--quiet", base.image, seconds=1800).code == 0:
        return base.image, base.digest
    return _stands_in(engine, base.python), ""


def _stands_in(engine: Engine, python: str) -> str:
    """Returns the name of a stand-in that has or installs this `python`."""
    plain = "standin:debian"
    if engine.attempt("image", "inspect", plain).code != 0:
        engine.docker("import", str(_archive()), plain, seconds=600)
    # The stand-in's suite is this machine's own.
    offered = subprocess.run(["apt-cache", "show", "python3"], capture_output=True, text=True, timeout=60)
    if f"\nVersion: {python}." in offered.stdout:
        return plain
    return _with_python(engine, plain, python)


def _archive() -> Path:
    """Returns a tar of a minimal Debian of this machine's own suite."""
    archive = CACHE / "debian.tar"
    if archive.exists():
        return archive
    if os.geteuid() != 0:
        raise Missing("a base image, or root to make a stand-in with debootstrap")
    debian, programs = tools.debian(), tools.unpacked()
    root = CACHE / "debian"
    shutil.rmtree(root, ignore_errors=True)
    script = programs / "usr/sbin/debootstrap"
    command = [str(script), "--variant=minbase", debian.suite, str(root), debian.uri]
    environment = os.environ | {"DEBOOTSTRAP_DIR": str(programs / "usr/share/debootstrap")}
    made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    if made.returncode != 0:
        raise Missing(f"a stand-in base: debootstrap says {made.stdout.strip()[-300:]}")
    unfinished = archive.with_suffix(".part")
    packing = ["tar", "--create", "--file", str(unfinished), "--directory", str(root)]
    subprocess.run([*packing, "--exclude=./var/cache/apt/archives/*.deb", "."], check=True)
    shutil.rmtree(root)
    return unfinished.rename(archive)


def _with_python(engine: Engine, plain: str, python: str) -> str:
    """Returns the stand-in with this machine's own `python` in /usr/local."""
    name = f"standin:python{python}"
    if engine.attempt("image", "inspect", name).code == 0:
        return name
    folder = CACHE / "python"
    folder.mkdir(exist_ok=True)
    (folder / "Dockerfile").write_text(
        "ARG PLAIN\nFROM scratch AS python\nFROM ${PLAIN}\nCOPY --from=python / /usr/local/\n"
    )
    engine.docker(
        *("buildx", "build", "--load", "--tag", name, "--build-arg", f"PLAIN={plain}"),
        *("--build-context", f"python={_prefix(python)}", str(folder)),
        seconds=600,
    )
    return name


def _prefix(python: str) -> Path:
    """Returns the folder that this machine's `python` is installed in, all of it."""
    places = [shutil.which(f"python{python}"), *Path.home().glob(f".pyenv/versions/{python}.*/bin/python")]
    for program in filter(None, places):
        ask = [str(program), "-c", "import sys; print(sys.base_prefix, *sys.version_info[:2])"]
        said = subprocess.run(ask, capture_output=True, text=True, timeout=60)
        prefix, *version = said.stdout.split() or [""]
        if ".".join(version) == python and Path(prefix) not in (Path("/usr"), Path("/usr/local")):
            return Path(prefix)
    raise Missing(f"Python {python} in a folder of its own, for a stand-in base that has it")
