"""Another interpreter: its search path, and the directories whose .pth files it reads.

The search path is read from its environment's files, and the interpreter is not started; where its .pth files
lie it says itself.
"""

import json
import os
import re
import shutil
import site
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bundle import files
from bundle.environment.search import EDITABLE, Editable, SearchPath, added_by_pth, literals, search_path
from bundle.errors import EnvironmentUnfit, UsageError

_SITES = ("lib/{0}/site-packages", "lib64/{0}/site-packages", "local/lib/{0}/dist-packages")
_DEBIAN = "lib/python3/dist-packages"  # one for every Python 3
_BASES = 4  # environments that stand on one another


def search_path_of(environment: str) -> SearchPath:
    """What a program of that environment would search: `environment` is its python, or its directory.

    $PYTHONPATH comes first, as it would there; the directory of the program itself is nobody's to know.
    Raises UsageError where there is no such environment.
    """
    prefix = _prefix(environment)
    sites = _sites(prefix) if prefix else []
    if not sites:
        shown = files.printable(environment[:200])
        raise UsageError(
            f"--env {shown}: no Python environment: name its python, like .venv/bin/python, or its directory"
        )
    named = os.environ.get("PYTHONPATH", "")
    paths = [path for path in named.split(os.pathsep) if path] + [
        str(path) for site in sites for path in (site, *added_by_pth([site]))
    ]
    editable = tuple(found for site in sites for found in _editable(site))
    return search_path(paths, named, Path.cwd())._replace(editable=editable)


def active() -> str | None:
    """The environment that is active around this program, where it runs in one of its own; None for none."""
    own = Path(sys.prefix)
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        named = os.environ.get(variable)
        if named and Path(named) != own:
            return named
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        program = shutil.which("python3", path=folder) or shutil.which("python", path=folder)
        if folder and program and Path(folder).parent != own and _sites(Path(folder).parent):
            return program
    return None


def _prefix(environment: str) -> Path | None:
    """The directory that an environment is below."""
    path = Path(environment).absolute()
    if files.is_directory(path):
        return path
    program = _python(environment)
    return Path(program).absolute().parent.parent if program else None


def _sites(prefix: Path) -> list[Path]:
    """The directories of packages of an environment, and of those that it stands on, in their order."""
    by_place = {place.resolve(): place for place in reversed([*_places(prefix)]) if files.is_directory(place)}
    return list(reversed(by_place.values()))


def _places(prefix: Path) -> Iterator[Path]:
    """Where the packages of an environment may lie."""
    for _ in range(_BASES):
        settings = _settings(prefix / "pyvenv.cfg")
        release = _release(prefix, settings)
        places = [*(site.format(release) for site in _SITES), *(() if settings else (_DEBIAN,))]
        if not settings:
            yield Path(os.path.expanduser("~"), ".local", _SITES[0].format(release))  # noqa: PTH111
        for place in places if release else ():
            yield prefix / place
        if settings.get("include-system-site-packages", "").lower() != "true" or "home" not in settings:
            return
        prefix = Path(settings["home"]).parent


def _settings(file: Path) -> dict[str, str]:
    """What a pyvenv.cfg says; nothing where there is none."""
    lines = (line.partition("=") for line in (files.read(file, 1 << 16) or "").splitlines())
    return {name.strip().lower(): value.strip() for name, found, value in lines if found}


def _release(prefix: Path, settings: dict[str, str]) -> str:
    """The name of the directories of its release, like "python3.12"; "" where that cannot be told."""
    said = re.match(r"3\.\d+", settings.get("version", settings.get("version_info", "")))
    if said:
        return f"python{said[0]}"
    program = prefix / "bin/python3"
    name = program.resolve().name
    if re.fullmatch(r"python3\.\d+", name):
        return name
    found = sorted({path.name for lib in ("lib", "local/lib") for path in (prefix / lib).glob("python3.*")})
    return found[0] if len(found) == 1 else ""


def _editable(site: Path) -> Iterator[Editable]:
    """The finders that editable installs of setuptools have put into a directory of packages."""
    for file in sorted(site.glob(f"{EDITABLE}*_finder.py")):
        said = literals(files.read(file, 1 << 20))
        mapping, namespaces = said.get("MAPPING"), said.get("NAMESPACES")
        yield Editable(
            {str(k): str(v) for k, v in mapping.items()} if isinstance(mapping, dict) else {},
            {str(k): tuple(map(str, v)) for k, v in namespaces.items() if isinstance(v, list)}
            if isinstance(namespaces, dict)
            else {},
        )


_SECONDS = 60  # for an interpreter to start, on a busy machine and a network's disk
# Without $PYTHON..., without the current directory, without writing bytecode.
_ISOLATED = ("-E", "-P", "-B", "-c")
_QUESTION = """
import json, site, sys, sysconfig
user = site.getusersitepackages() if site.ENABLE_USER_SITE else None
try:
    import bundle.patches.hook as hook
    said = {"bundle": hook.__file__, "format": hook.FORMAT, "fault": ""}
except Exception as error:
    said = {"bundle": None, "format": None, "fault": f"{type(error).__name__}: {error}"}
sites = [*site.getsitepackages(), *([user] if user else [])]
print(json.dumps({"own": sysconfig.get_path("purelib"), "sites": sites, "user": user, **said}))
"""


class Sites(NamedTuple):
    """The directories whose .pth files an interpreter reads; `own` is the one that is its environment's."""

    python: str
    own: Path
    sites: tuple[Path, ...]
    user: Path | None  # among `sites`; of the user who asks
    bundle: Path | None  # the module bundle.patches.hook that it imports
    format: int | None  # of that module
    fault: str  # why it imports none


def sites_of(environment: str) -> Sites:
    """The sites of an environment, named by its python or its directory. Starts that interpreter.

    Raises UsageError where that is none, EnvironmentUnfit where it reads no .pth in its own directory.
    """
    python = _python(environment)
    shown = files.printable(environment[:200])
    why = "there is no python"
    if python is not None:
        try:
            ran = subprocess.run(
                [python, *_ISOLATED, _QUESTION], capture_output=True, text=True, timeout=_SECONDS
            )
            said = json.loads(ran.stdout.splitlines()[-1])
            found = Sites(
                python=python,
                own=Path(said["own"]),
                sites=tuple(dict.fromkeys(map(Path, said["sites"]))),
                user=Path(said["user"]) if said["user"] else None,
                bundle=Path(said["bundle"]) if said["bundle"] else None,
                format=said["format"],
                fault=said["fault"],
            )
        except (OSError, subprocess.SubprocessError) as error:
            why = str(error)
        except (IndexError, ValueError, KeyError, TypeError):
            last = ran.stderr.strip().splitlines()[-1:]
            why = f"it is no Python from 3.11 on ({files.printable(*last)})" if last else "it says nothing"
        else:
            if found.own not in found.sites:
                raise EnvironmentUnfit(
                    f"{shown}: Python reads no .pth in {found.own}, where its packages are"
                )
            return found
    raise UsageError(f"--env {shown}: {why}: name its python, like .venv/bin/python, or its directory")


def sites_in(environment: str) -> tuple[Path, ...]:
    """The directories whose .pth files another interpreter reads, told as in `search_path_of`."""
    prefix = _prefix(environment)
    return tuple(_sites(prefix)) if prefix else ()


def own_sites() -> tuple[Path, ...]:
    """The directories whose .pth files this very interpreter reads."""
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return tuple(map(Path, [*site.getsitepackages(), *user]))


def _python(environment: str) -> str | None:
    """The interpreter that is named, or that stands in the directory that is named."""
    path = Path(environment)
    if files.is_directory(path):
        path = path / "bin/python"
        return str(path.absolute()) if files.is_file(path) else None
    return str(path.absolute()) if files.is_file(path) else shutil.which(environment)
