"""A Python in which `sglang` is the contract server: a program that starts ours with another search path."""

import shlex
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
HASHES = '''"""SGLang's hash of a tensor that is not on a GPU (0.5.16, managers/mm_utils.py)."""
import hashlib
import torch

def tensor_hash(tensor):
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return int.from_bytes(hashlib.sha256(memoryview(data)).digest()[:8], "big")
'''
SERIALIZER = """from tests.rollouts.sglang.contract_weights import open_bucket

class MultiprocessingSerializer:
    @staticmethod
    def deserialize(data):
        values, places = open_bucket(data)
        return {"flattened_tensor": values, "metadata": places}
"""


def build_python(folder: Path, version: str | None = "0.5.16") -> str:
    """The path of the program; None: without sglang."""
    folder.mkdir(parents=True, exist_ok=True)
    site = folder / "site"
    files = {
        "sglang/__init__.py": "",
        "sglang/launch_server.py": "from tests.rollouts.sglang.contract_process import main\nmain()\n",
        "sglang/srt/__init__.py": "print('noise')\n",
        "sglang/srt/managers/__init__.py": "",
        "sglang/srt/managers/mm_utils.py": HASHES,
        "sglang/srt/utils/__init__.py": SERIALIZER,
        f"sglang-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n",
    }
    for name, text in files.items() if version else ():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    program = folder / "python"
    search = shlex.quote(f"{site}:{REPOSITORY}")
    program.write_text(f'#!/bin/sh\nPYTHONPATH={search} exec {shlex.quote(sys.executable)} "$@"\n')
    program.chmod(0o755)
    return str(program)
