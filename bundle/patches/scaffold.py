"""The files that a new patch starts from, and the steps from them to a test that passes."""

import re
from pathlib import Path

from ruamel.yaml import YAML

from bundle.errors import UsageError
from bundle.patches.catalogue import PATCHES
from bundle.patches.megatron_core import DEFAULT_RELEASE


def create_bundle_patch_files(patch_id: str, checkout: Path) -> str:
    """Write the files of a new patch into a checkout of this project; return what to do next.

    Raises UsageError for an id that is taken or malformed, for a directory that is not a checkout, and where
    one of the files exists.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", patch_id):
        raise UsageError(f"{patch_id}: an id has lower-case words joined by dashes, like mtp-zero-layers")
    if patch_id in {patch.id for patch in PATCHES}:
        raise UsageError(f"{patch_id}: a patch has this id already")
    if not (checkout / "bundle/patches/catalogue").is_dir():
        raise UsageError(f"{checkout} is not a checkout of mcore-bundle. Run this command in one")
    module = patch_id.replace("-", "_")
    title = patch_id.replace("-", " ").capitalize()
    values = {"patch_id": patch_id, "module": module, "title": title, "having": DEFAULT_RELEASE}
    paths = {
        "entry": f"bundle/patches/catalogue/{module}.py",
        "wrapper": f"bundle/replacements/{module}.py",
        "measurement": f"bundle/verification/measurements/{module}.py",
        "test": f"tests/upstream/test_{module}.py",
    }
    taken = [path for path in paths.values() if (checkout / path).exists()]
    if taken:
        raise UsageError("The files of a new patch exist already. Choose another id, or remove them:", taken)
    templates = YAML(typ="safe").load(Path(__file__).with_name("scaffold.yaml"))
    for kind, path in paths.items():
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        (checkout / path).write_text(templates[kind].format(**values), "utf-8")
    return str(templates["steps"]).format(files=", ".join(paths.values()), **paths, **values)
