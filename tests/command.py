"""The command line as a user starts it: a process of its own, with the package of this checkout."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parents[1]


def run_bundle(
    *words: str | Path,
    cwd: Path | None = None,
    code: int | None = None,
    timeout: float = 300,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.CompletedProcess[str]:
    """Return what `mcore-bundle WORDS` printed; with `code`, fail on another exit code.

    `environment` is added to this process's; the checkout comes first in PYTHONPATH.
    """
    variables = os.environ | dict(environment)
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [variables.get("PYTHONPATH")])])
    result = subprocess.run(
        [sys.executable, "-m", "bundle", *map(str, words)],
        cwd=cwd,
        env=variables,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert code is None or result.returncode == code, result.stdout + result.stderr
    return result
