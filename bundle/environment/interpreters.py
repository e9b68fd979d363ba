"""The search path of another interpreter, and the directories whose .pth files it reads.

The search path is read from the files of its environment, without starting the interpreter. `query_sites`
starts the interpreter, which tells where it reads .pth files.
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
from bundle.environment.search import (
    EDITABLE_PREFIX,
    EditableInstall,
    SearchPath,
    build_search_path,
    parse_literals,
    read_pth_entries,
)
from bundle.errors import EnvironmentUnfit, UsageError

_SITE_PATTERNS = ("lib/{0}/site-packages", "lib64/{0}/site-packages", "local/lib/{0}/dist-packages")
_DEBIAN_SITE = "lib/python3/dist-packages"  # one for every Python 3
_MAX_VENV_CHAIN_LENGTH = 4  # environments that stand on one another


def reconstruct_search_path(environment: str) -> SearchPath:
    """Return the search path of a program of `environment`, which is given by its python or its directory.

    $PYTHONPATH comes first, as it would there; the directory of the program itself is unknown and left out.
    Raise UsageError where there is no such environment.
    """
    prefix = _find_prefix(environment)
    sites = _find_sites_with_bases(prefix) if prefix else []
    if not sites:
        shown = files.to_printable(environment[:200])
        raise UsageError(
            f"--env {shown}: not a Python environment. Name its interpreter, such as .venv/bin/python, or its"
            " directory"
        )
    python_path = os.environ.get("PYTHONPATH", "")
    paths = [path for path in python_path.split(os.pathsep) if path] + [
        str(path) for site in sites for path in (site, *read_pth_entries([site]))
    ]
    editable = tuple(install for site in sites for install in _read_editable_finders(site))
    return build_search_path(paths, python_path, Path.cwd())._replace(editable=editable)


def find_other_environment() -> str | None:
    """Return the active environment if this program runs in another one; None where there is no other."""
    prefix = Path(sys.prefix)
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        environment = os.environ.get(variable)
        if environment and Path(environment) != prefix:
            return environment
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        program = shutil.which("python3", path=folder) or shutil.which("python", path=folder)
        if (
            folder
            and program
            and Path(folder).parent != prefix
            and _find_sites_with_bases(Path(folder).parent)
        ):
            return program
    return None


def _find_prefix(environment: str) -> Path | None:
    """Return the root directory of an environment, named by its python or its directory."""
    path = Path(environment).absolute()
    if files.is_directory(path):
        return path
    program = _find_interpreter_or_environment_python(environment)
    return Path(program).absolute().parent.parent if program else None


def _find_sites_with_bases(prefix: Path) -> list[Path]:
    """Return the package directories of an environment and of the environments below it, in their order."""
    by_directory = {
        directory.resolve(): directory
        for directory in reversed([*_list_site_candidates(prefix)])
        if files.is_directory(directory)
    }
    return list(reversed(by_directory.values()))


def _list_site_candidates(prefix: Path) -> Iterator[Path]:
    """Yield the directories in which the packages of an environment may lie."""
    for _ in range(_MAX_VENV_CHAIN_LENGTH):
        settings = _read_settings(prefix / "pyvenv.cfg")
        release = _find_python_directory_name(prefix, settings)
        directories = [
            *(site.format(release) for site in _SITE_PATTERNS),
            *(() if settings else (_DEBIAN_SITE,)),
        ]
        if not settings:
            yield Path(os.path.expanduser("~"), ".local", _SITE_PATTERNS[0].format(release))  # noqa: PTH111
        for directory in directories if release else ():
            yield prefix / directory
        if settings.get("include-system-site-packages", "").lower() != "true" or "home" not in settings:
            return
        prefix = Path(settings["home"]).parent


def _read_settings(file: Path) -> dict[str, str]:
    """Return the settings of a pyvenv.cfg; none where there is no such file."""
    lines = (line.partition("=") for line in (files.read_text_if_small(file, 1 << 16) or "").splitlines())
    return {name.strip().lower(): value.strip() for name, separator, value in lines if separator}


def _find_python_directory_name(prefix: Path, settings: dict[str, str]) -> str:
    """Return the name of the directories of an environment's release, like "python3.12"; "" if unknown."""
    version_match = re.match(r"3\.\d+", settings.get("version", settings.get("version_info", "")))
    if version_match:
        return f"python{version_match[0]}"
    program = prefix / "bin/python3"
    name = program.resolve().name
    if re.fullmatch(r"python3\.\d+", name):
        return name
    names = sorted({path.name for lib in ("lib", "local/lib") for path in (prefix / lib).glob("python3.*")})
    return names[0] if len(names) == 1 else ""


def _read_editable_finders(site: Path) -> Iterator[EditableInstall]:
    """Yield the finders that editable installs of setuptools have put into a directory of packages."""
    for file in sorted(site.glob(f"{EDITABLE_PREFIX}*_finder.py")):
        constants = parse_literals(files.read_text_if_small(file, 1 << 20))
        mapping, namespaces = constants.get("MAPPING"), constants.get("NAMESPACES")
        yield EditableInstall(
            {str(k): str(v) for k, v in mapping.items()} if isinstance(mapping, dict) else {},
            {str(k): tuple(map(str, v)) for k, v in namespaces.items() if isinstance(v, list)}
            if isinstance(namespaces, dict)
            else {},
        )


_START_SECONDS = 60  # for an interpreter to start, on a busy machine and a network's disk
# Without $PYTHON..., without the current directory, without writing bytecode.
_SITES_PROBE_OPTIONS = ("-E", "-P", "-B", "-c")
_SITES_PROBE_SCRIPT = """
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
    """The directories whose .pth files an interpreter reads.

    `purelib` is the directory of its own environment.
    """

    python: str
    purelib: Path
    sites: tuple[Path, ...]
    user_site: Path | None  # among `sites`; of the user who asks
    hook_file: Path | None  # the module bundle.patches.hook that it imports
    hook_format: int | None  # of that module
    fault: str  # why it imports none


def query_sites(environment: str) -> Sites:
    """Return the sites of an environment, named by its python or its directory; this starts that interpreter.

    Raise UsageError where there is no such interpreter, and EnvironmentUnfit where it reads no .pth in its
    own directory.
    """
    python = _find_interpreter_or_environment_python(environment)
    shown = files.to_printable(environment[:200])
    reason = "no interpreter was found"
    if python is not None:
        try:
            process = subprocess.run(
                [python, *_SITES_PROBE_OPTIONS, _SITES_PROBE_SCRIPT],
                capture_output=True,
                text=True,
                timeout=_START_SECONDS,
            )
            answer = json.loads(process.stdout.splitlines()[-1])
            sites = Sites(
                python=python,
                purelib=Path(answer["own"]),
                sites=tuple(dict.fromkeys(map(Path, answer["sites"]))),
                user_site=Path(answer["user"]) if answer["user"] else None,
                hook_file=Path(answer["bundle"]) if answer["bundle"] else None,
                hook_format=answer["format"],
                fault=answer["fault"],
            )
        except (OSError, subprocess.SubprocessError) as error:
            reason = str(error)
        except (IndexError, ValueError, KeyError, TypeError):
            last = process.stderr.strip().splitlines()[-1:]
            reason = (
                f"it is not Python 3.11 or newer ({files.to_printable(*last)})"
                if last
                else "it printed nothing"
            )
        else:
            if sites.purelib not in sites.sites:
                raise EnvironmentUnfit(
                    f"{shown}: Python does not read .pth files in {sites.purelib}, where its packages are"
                )
            return sites
    raise UsageError(
        f"--env {shown}: {reason}. Name the Python interpreter of an environment, such as .venv/bin/python,"
        " or the directory of the environment"
    )


def find_sites(environment: str) -> tuple[Path, ...]:
    """Return the directories whose .pth files another interpreter reads; see `reconstruct_search_path`."""
    prefix = _find_prefix(environment)
    return tuple(_find_sites_with_bases(prefix)) if prefix else ()


def list_own_sites() -> tuple[Path, ...]:
    """Return the directories whose .pth files this interpreter reads."""
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return tuple(map(Path, [*site.getsitepackages(), *user]))


def _find_interpreter_or_environment_python(environment: str) -> str | None:
    """Return the path of the interpreter that is named, or of the one in the directory that is named."""
    path = Path(environment)
    if files.is_directory(path):
        path = path / "bin/python"
        return str(path.absolute()) if files.is_file(path) else None
    return str(path.absolute()) if files.is_file(path) else shutil.which(environment)
