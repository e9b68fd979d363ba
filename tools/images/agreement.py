"""Whether everything that speaks of the images says the same, and what a release still lacks."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bundle import files
from tools.images import locks, page
from tools.images.definition import Definition, Target, targets
from tools.images.locks import Project
from tools.images.plan import Planned

# What a Dockerfile may be given by whoever builds, beside what the bake file gives.
OPTIONAL = {"MAX_JOBS", "TORCH_CUDA_ARCH_LIST", "FLASH_ATTN_CUDA_ARCHS"}


def disagreements(root: Path, definition: Definition, project: Project) -> Iterator[str]:
    """Every place in the checkout that does not follow docker-bake.json and pyproject.toml."""
    for stack in definition.stacks:
        yield from _of_lock(root, definition, project, stack)
    if files.read_text_if_small(root / page.FILE) != page.markdown(definition):
        yield f"{page.FILE} is not what `python -m tools.images page` makes: write it again"
    if files.read_text_if_small(root / page.MATRIX) != page.matrix(definition, project.version):
        yield f"{page.MATRIX} is not what `python -m tools.images page` makes: write it again"


def _of_lock(root: Path, definition: Definition, project: Project, name: str) -> Iterator[str]:
    remedy = f"run `make locks STACK={name}`"
    stack = definition.stacks[name]
    apart = definition.backends[stack.backend].apart
    if locks.read(root, f"{name}.in") != locks.input_text(definition, project, name):
        yield f"images/locks/{name}.in does not follow docker-bake.json and pyproject.toml: {remedy}"
    kept, other = locks.read(root, f"{name}.txt"), locks.read(root, f"{name}.{apart.name}.txt")
    locked = locks.versions(kept) | locks.versions(other)
    for package, pin in stack.pins.items():
        if locked.get(package, set()) != {pin.version}:
            has = _shown(locked, package)
            yield f"images/locks/{name}.txt has {has}, docker-bake.json {pin.version}: {remedy}"
    for wanted in map(Requirement, project.requirements(stack.extras)):
        versions = locked.get(canonicalize_name(wanted.name), set())
        if not versions or not all(wanted.specifier.contains(v, prereleases=True) for v in versions):
            has = _shown(locked, canonicalize_name(wanted.name))
            yield f"images/locks/{name}.txt has {has}, pyproject.toml asks for {wanted}: {remedy}"
    for part, content in locks.part_texts(definition, project, name, kept).items():
        if locks.read(root, part) != content:
            yield f"images/locks/{part} differs from its part of {name}.txt: {remedy}"
    for package, block in locks.blocks(kept):
        if "--hash=sha256:" not in block:
            yield f"images/locks/{name}.txt has no hash of {package}: {remedy}"


def _shown(locked: Mapping[str, set[str]], package: str) -> str:
    return f"{package} {' and '.join(sorted(locked.get(package, set()))) or 'nowhere'}"


def of_plan(
    plan: Mapping[str, Planned], root: Path, definition: Definition, project: Project
) -> Iterator[str]:
    """Every way in which bake's plan, by target, and the Dockerfiles do not follow the definition."""
    expected = {target.name: target for target in targets(definition)}
    images = {name for name, target in plan.items() if target.tags}
    if images != set(expected):
        yield f"bake builds {', '.join(sorted(images))}; the stacks make {', '.join(sorted(expected))}"
    for name in sorted(images & set(expected)):
        yield from _of_target(plan[name], expected[name], definition, project)
    for name, target in plan.items():
        yield from _of_arguments(name, target, root)


def _of_target(planned: Planned, target: Target, definition: Definition, project: Project) -> Iterator[str]:
    stack, base = definition.stacks[target.stack], definition.bases[target.base]
    versions = " ".join(f"{name}=={pin.version}" for name, pin in sorted(stack.pins.items()))
    labels, arguments = planned.labels, planned.args
    said = {
        "dockerfile": (planned.dockerfile, f"images/{target.backend}/Dockerfile"),
        "STACK": (arguments.get("STACK"), target.stack),
        "BASE": (arguments.get("BASE"), base.image),
        "BASE_DIGEST": (arguments.get("BASE_DIGEST"), base.digest),
        "the label of versions": (labels.get("mcore-bundle.versions"), versions),
        "the label of the version": (labels.get("org.opencontainers.image.version"), project.version),
    }
    for what, (has, wanted) in said.items():
        if has != wanted:
            yield f"{target.name}: {what} is {has!r} in the bake file, and the definition says {wanted!r}"
    for tag in planned.tags:
        missing = [word for word in (f":{project.version}-", *_words(target, definition)) if word not in tag]
        if missing:
            yield f"{target.name}: the tag {tag} does not say {', '.join(missing)}"


def _words(target: Target, definition: Definition) -> list[str]:
    pins = definition.stacks[target.stack].pins
    return [target.base, f"-torch{pins['torch'].version}", f"-mcore{pins['megatron-core'].version}"]


def _of_arguments(name: str, target: Planned, root: Path) -> Iterator[str]:
    file = target.dockerfile
    declared = dict(
        re.findall(r"^ARG (\w+)=?(.*)$", files.read_text_if_small(root / file) or "", re.MULTILINE)
    )
    given = set(target.args)
    for unknown in sorted(given - set(declared)):
        yield f"{name}: bake sets ARG {unknown}, but {file} does not declare it"
    for argument, default in declared.items():
        if argument not in OPTIONAL and re.search(r"[0-9]", default):
            yield f"{file}: ARG {argument} sets a version ({default}). Set it in docker-bake.json instead"
    if target.tags:
        for missing in sorted(set(declared) - given - OPTIONAL):
            yield f"{name}: {file} declares ARG {missing}, but bake does not set it"


def unfilled(definition: Definition) -> Iterator[str]:
    """Every digest and hash that nobody could read yet: a release needs them all."""
    for name, base in definition.bases.items():
        if not base.digest:
            yield f"BASES.{name}.digest: `docker buildx imagetools inspect {base.image}` says it"
    for name, source in definition.sources.items():
        if not source.checksum:
            yield f"SOURCES.{name}.checksum: the SHA-256 of {address(source.archive, source.commit)}"
    for name, stack in definition.stacks.items():
        for package, pin in stack.pins.items():
            if pin.hashes == []:
                yield f"STACKS.{name}.pins.{package}.hashes: of the CPU builds of {pin.version}"


def address(archive: str, commit: str) -> str:
    """Where a source is: the archive of a commit, or the archive itself."""
    return f"{archive}/{commit}.tar.gz" if commit else archive
