"""Where an environment's packages lie, asked of its own interpreter: what it reads when it starts."""

import json
import shutil
import site
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bundle import files
from bundle.errors import EnvironmentUnfit, UsageError

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


@dataclass(frozen=True)
class Sites:
    """The directories whose .pth files an interpreter reads; `own` is the one that is its environment's."""

    python: str
    own: Path
    sites: tuple[Path, ...]
    user: Path | None  # among `sites`; of the user who asks
    bundle: Path | None  # the module bundle.patches.hook that it imports
    format: int | None  # of that module
    fault: str  # why it imports none


def of(environment: str) -> Sites:
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


def own() -> tuple[Path, ...]:
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
