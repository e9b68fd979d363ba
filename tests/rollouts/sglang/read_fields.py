"""Reads the fields of requests in wheels of SGLang, by ast.

`python -m tests.rollouts.sglang.read_fields WHEEL...` prints {version: {class: [fields]}}: fields.json.
"""

import ast
import json
import sys
import zipfile
from pathlib import Path

MODULES = {
    "io_struct": "sglang/srt/managers/io_struct.py",
    "sampling": "sglang/srt/sampling/sampling_params.py",
}
CLASSES = (
    "AbortReq", "BeginWeightUpdateReqInput", "CheckWeightsReqInput", "ContinueGenerationReqInput",
    "EndWeightUpdateReqInput", "FlushCacheReqInput", "GenerateReqInput", "PauseGenerationReqInput",
    "ReleaseMemoryOccupationReqInput", "ResumeMemoryOccupationReqInput", "SamplingParams",
    "UpdateWeightFromDiskReqInput", "UpdateWeightVersionReqInput", "UpdateWeightsFromTensorReqInput",
)  # fmt: skip


def read_fields(wheel: Path) -> dict[str, list[str]]:
    """The annotated fields of each class, with those of its bases in the same module."""
    fields: dict[str, list[str]] = {}
    with zipfile.ZipFile(wheel) as archive:
        for path in MODULES.values():
            classes = {
                node.name: node
                for node in ast.parse(archive.read(path)).body
                if isinstance(node, ast.ClassDef)
            }
            for name in CLASSES:
                if name in classes:
                    fields[name] = sorted(set(_walk(classes, name)))
    return fields


def _walk(classes, name):
    for base in classes[name].bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from _walk(classes, base.id)
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


if __name__ == "__main__":
    wheels = [Path(argument) for argument in sys.argv[1:]]
    print(json.dumps({wheel.name.split("-")[1]: read_fields(wheel) for wheel in wheels}, indent=1))
