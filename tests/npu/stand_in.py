"""Builds the stand-in libraries that let the real torch-npu be imported on a machine without CANN."""

import re
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("acl.c")
# torch_npu's own libraries, as far as they are loaded at import; and those of CANN that these ask for.
WHEEL = ("lib/libtorch_npu.so", "lib/libtensorpipe.so", "lib/libnpu_profiler.so", "_C*.so")
EMPTY = ("hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")
CANN = re.compile(r"acl|rt[A-Z]|Msprof|[Hh]ccl")


def build(torch_npu: Path, directory: Path) -> list[str]:
    """Writes the libraries into `directory`; the names that they refuse, each with a line on stderr."""
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / "libascendcl.so"
    _compile(SOURCE.read_text(), library)
    wanted = {name for file in _files(torch_npu) for name in _symbols(file, "--undefined-only")}
    refused = sorted(filter(CANN.match, wanted - _symbols(library, "--defined-only")))
    _compile("\n".join([SOURCE.read_text(), "#include <stdio.h>", *map(_refusal, refused)]), library)
    for name in EMPTY:
        options = ("-Wl,--no-as-needed", f"-L{directory}", "-lascendcl")
        _compile("", directory / f"lib{name}.so", *options)
    return refused


def _files(torch_npu: Path) -> list[Path]:
    return [file for pattern in WHEEL for file in torch_npu.glob(pattern)]


def _symbols(file: Path, which: str) -> set[str]:
    listing = subprocess.run(["nm", "-D", which, file], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].partition("@")[0] for line in listing.splitlines() if line.strip()}


def _refusal(name: str) -> str:
    """A function that says that it is missing and answers with an error (500000: internal)."""
    text = f"emulated: {name} is not in the stand-in for CANN"
    return f'int {name}(void) {{ fputs("{text}\\n", stderr); return 500000; }}'


def _compile(source: str, library: Path, *options: str) -> None:
    flags = ("-O1", "-fPIC", "-shared", "-Wall", "-Werror", f"-Wl,-soname,{library.name}")
    command = ["cc", *flags, "-o", str(library), "-x", "c", "-", *options]
    subprocess.run(command, input=source, text=True, check=True)
