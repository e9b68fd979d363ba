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

Made from `docker-bake.json` by `python -m tools.images page`; a test compares. That file is the one place of
every version, each with its reason: bake reads it beside `docker-bake.hcl`, and so do the locks, the labels
and this page.

| group | builds |
|---|---|
| `docker buildx bake` | the CPU image |
| `docker buildx bake cuda`, `ascend`, `all` | the images of a backend, or every one |
| `CI=true docker buildx bake ...` | for every platform, with provenance and SBOM; writes to `CACHE` |

`FABRIC=ib|efa|none` chooses the RDMA user libraries of the CUDA images; an NPU has its own network.
`TORCH_INDEX` is where the CPU builds of torch come from, in the images without CUDA.
"""

_CHANGING = """\
## Changing a version

Edit `docker-bake.json`, then:

```console
$ make locks    # images/locks/*.in and, with a hash for every file, *.txt; one stack: make locks STACK=cpu
```

`python -m tools.images check` names every place that does not follow; with `--release` it also fails until
each digest, checksum and hash is filled that nobody could read where this was written. No index is named in
a lock: the one that pip and uv are configured for is asked. `make demo` installs from a part of the lock of
the stack `cpu`; only torch, whose build differs by machine, is taken there without a hash.

## Running

```
docker run --rm IMAGE doctor
docker run --rm --gpus all --shm-size 16g --ulimit memlock=-1 -v runs:/home/bundle IMAGE train demo
docker run --rm --shm-size 16g --group-add "$(stat -c %g /dev/davinci0)" \\
{npus}
  -v runs:/home/bundle IMAGE train demo
```

What every image promises: [images/README.md](../images/README.md). On Ascend the device nodes belong to a
group of the host, which the user of the image is not in: `--group-add`, in Kubernetes `supplementalGroups`.
The driver stays on the host, whose files the container is shown; `--privileged` is not needed. With Ascend's
own container runtime `ASCEND_VISIBLE_DEVICES` takes the place of `--device` and of the driver's `--volume`.
`launch docker` writes these lines itself.

`ascend-a2` and `ascend-a3` train with every supported megatron-core, without MindSpeed: another release than
theirs is the folder of its source, `train --mcore DIRECTORY`. For Atlas A5 give the base of its chip, in the
same CANN and Python: `--set ascend-a3.args.BASE=quay.io/ascend/cann:TAG --set ascend-a3.args.BASE_DIGEST=`.
The others have a MindSpeed as well, and the megatron-core that it is made for. There is none with its line
for 0.12.1: that imports `megatron.training`, which no package of megatron-core has.

## An image knows itself

`python -m tools.images fingerprint` is the digest of everything that an image is made from: its part of
`docker-bake.json`, its Dockerfile, its locks, the package. It is the label `mcore-bundle.inputs`, given to
bake as `INPUTS="$(python -m tools.images fingerprint --json)"`. The build ends with its verb `stamp`, which
fails unless the versions installed are those of the stack, and writes `/opt/bundle/build-info.json`.
`mcore-bundle doctor` compares that record with what is installed now, and names every drift. The ranks of a
job agree on the digest of the inputs before they start: nodes with different images are told apart.

## Built in CI

`.github/workflows/images.yml` makes its jobs of bake's plan (`python -m tools.images matrix`): one for each
image whose fingerprint is not that of the commit before, and each platform, on a machine of that platform. A
pull request pushes nothing; a tag is refused while `check --release` finds something to fill.

## Wheels that take hours

Transformer Engine's extension and flash-attn are published as source. The targets `wheels-STACK` compile
them, and bake hands them to the image as the context `wheelhouse`. Whoever has them gives them instead:
`--set cuda-mcore0-16.contexts.wheelhouse=DIRECTORY`.
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
