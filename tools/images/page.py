"""What is made from docker-bake.json to be read, by people and by `launch`: `python -m tools.images page`."""

import json
from collections.abc import Iterator

from bundle.targets import docker
from tools.images.definition import Definition, targets
from tools.markdown import table

FILE = "docs/images.md"
MATRIX = "bundle/targets/images.json"
_FABRIC = "ib"  # the default of docker-bake.hcl

_INTRODUCTION = """\
# Images

`docker buildx bake` builds the images:

| command | builds |
|---|---|
| `docker buildx bake` | the CPU image |
| `docker buildx bake cuda`, `ascend`, `all` | the images of a backend, or every one |
| `CI=true docker buildx bake ...` | for every platform, with provenance and SBOM; writes to `CACHE` |

`FABRIC=ib|efa|none` chooses the RDMA user libraries of the CUDA images. An NPU has its own network.
`TORCH_INDEX` is the index of torch's CPU builds, which the images without CUDA use.

`docker-bake.json` has every version and its reason; no other file sets a version. bake reads this file
together with `docker-bake.hcl`. The locks, the labels and this page are made from `docker-bake.json` too.
`python -m tools.images page` makes this page, and a test compares the two.
"""

_CHANGING = """\
## Changing a version

Edit `docker-bake.json`, then:

```console
$ make locks    # images/locks/*.in and, with a hash for every file, *.txt; one stack: make locks STACK=cpu
```

- `python -m tools.images check` lists every place that does not follow `docker-bake.json`.
- With `--release`, it also fails until every digest, checksum and hash is filled in.
  `python -m tools.images fill` fills them in, on a machine with docker buildx and internet.
- A lock does not set a package index. pip and uv use their configured index.
- `make demo` installs from a part of the lock of the stack `cpu`. Only torch is installed without a hash,
  because its build differs by machine.

## Running

```
docker run --rm IMAGE doctor
docker run --rm --gpus all --shm-size 16g --ulimit memlock=-1 -v runs:/home/bundle IMAGE train demo
docker run --rm --shm-size 16g --group-add "$(stat -c %g /dev/davinci0)" \\
{npus}
  -v runs:/home/bundle IMAGE train demo
```

[images/README.md](../images/README.md) lists what every image guarantees. `launch docker` makes such a
command itself. On Ascend:

- The device nodes belong to a group of the host. The user of the image is not in that group. Add the group by
  `--group-add`, in Kubernetes by `supplementalGroups`.
- The driver stays on the host, and the container mounts its files. `--privileged` is not needed.
- With Ascend's own container runtime, `ASCEND_VISIBLE_DEVICES` takes the place of `--device` and of the
  driver's `--volume`.

On Ascend, choose the image by the megatron-core:

- `ascend-a2` and `ascend-a3` train with every supported megatron-core, without MindSpeed. For another release
  than the image's, give the folder of its source: `train --mcore DIRECTORY`.
- For Atlas A5, give the base image for that chip, with the same CANN and Python:
  `--set ascend-a3.args.BASE=quay.io/ascend/cann:TAG --set ascend-a3.args.BASE_DIGEST=`.
- The other images also have MindSpeed, and the megatron-core that this MindSpeed is made for.
- No image has MindSpeed's branch for 0.12.1. That branch imports `megatron.training`, which is not in the
  package megatron-core.

## An image knows itself

`python -m tools.images fingerprint` prints the digest of everything that an image is made from: its part of
`docker-bake.json`, its Dockerfile, its locks, and the package.

- The digest is the label `mcore-bundle.inputs`. bake gets it as
  `INPUTS="$(python -m tools.images fingerprint --json)"`.
- The build ends with `python -m tools.images stamp`. This command writes `/opt/bundle/build-info.json`. It
  fails unless the installed versions are those of the stack.
- `mcore-bundle doctor` compares this file with what is installed now, and names every difference.
- The ranks of a job compare the digest of the inputs before they start. Nodes with different images are found
  in this way.

## Built in CI

`.github/workflows/images.yml` makes its jobs from bake's plan (`python -m tools.images matrix`). There is one
job for each image and each platform, on a machine of that platform. An image with the same fingerprint as at
the previous commit has no job. A pull request pushes no image. A tag is refused while `check --release`
fails.

## Wheels that take hours

Transformer Engine's extension and flash-attn are published as source. The targets `wheels-STACK` compile
them. bake hands the wheels to the image as the context `wheelhouse`. If you have the wheels, give them
instead: `--set cuda-mcore0-16.contexts.wheelhouse=DIRECTORY`.
"""


def markdown(definition: Definition) -> str:
    """The text of docs/images.md."""
    rows = (
        (f"`{t.name}`", f"`{t.stack}`", f"`{definition.bases[t.base].image}`", *_main(definition, t.stack))
        for t in targets(definition)
    )
    parts = [
        _INTRODUCTION,
        "## Targets\n",
        table(("target", "stack", "base", "torch", "megatron-core"), rows),
        _CHANGING.format(npus=" \\\n".join(f"  {option}" for option in docker.list_npu_options(2)) + " \\"),
        "## Stacks\n",
    ]
    for name, stack in definition.stacks.items():
        parts += [f"### {name}\n", table(("package", "version", "why"), _pins(definition, name))]
        if stack.backend == "ascend" and stack.source:
            source = definition.sources[stack.source]
            parts.append(f"MindSpeed at `{source.commit[:12]}`: {source.why}.\n")
    parts += [
        "## Bases\n",
        table(("base", "image", "Python", "why"),
               ((n, f"`{b.image}`", b.python, b.why) for n, b in definition.bases.items())),
    ]  # fmt: skip
    return "\n".join(parts)


def matrix(definition: Definition, version: str) -> str:
    """The text of bundle/targets/images.json: the tags of docker-bake.hcl, for a version of the package."""
    rows = []
    for target in targets(definition):
        torch, megatron = _main(definition, target.stack)
        fabric = f"-{_FABRIC}" if target.backend == "cuda" else ""
        tag = f"{target.backend}:{version}-{target.base}-torch{torch}-mcore{megatron}{fabric}"
        chip = target.base.removeprefix(target.backend).removeprefix("-")
        rows.append({"backend": target.backend, "chip": chip, "megatron": megatron, "tag": tag})
    return json.dumps(rows, indent=2) + "\n"


def _main(definition: Definition, stack: str) -> Iterator[str]:
    for package in ("torch", "megatron-core"):
        yield definition.stacks[stack].pins[package].version


def _pins(definition: Definition, stack: str) -> Iterator[tuple[str, ...]]:
    for package, pin in definition.stacks[stack].pins.items():
        yield package, pin.version, pin.why
