"""The megatron-core of projects that use one: commits that they pin, branches of a fork, what they change."""

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from bundle.environment import packages
from bundle.patches.definitions import Definitions
from bundle.patches.source import Module, parse_module
from tests.history.decided import decisions
from tests.history.git import CommitTree, Repository, files
from tests.history.tally import Row
from tests.history.truth import PRESENT

NUMBER = "megatron/core/package_info.py"
# A branch that goes on (main) says nothing about what was built.
_REF = re.compile(r"(?:Megatron-LM(?:\.git)?@|MEGATRON_COMMIT=)(core_[\w.-]+|[0-9a-f]{7,40})\b")
_BUILT, _CHANGE = "docker/Dockerfile", "docker/patch/latest/megatron.patch"


def pinned(project: Repository) -> set[str]:
    """What a project has named of Megatron-LM in its history: submodules' commits; refs in what it builds."""
    links = project.ask("log", "--all", "--raw", "--no-abbrev", "--format=", "--", ":(glob)**/*Megatron-LM*")
    commits = {line.split()[3] for line in links.splitlines() if line.split()[1] == "160000"}
    builds = project.ask(
        "log", "--all", "-p", "--format=", "-GMegatron-LM|MEGATRON", "--", "docker", ".github"
    )
    return commits | set(_REF.findall(builds))


def branches(project: Repository) -> list[str]:
    """The heads of a fork's branches; none of what is no Megatron-LM."""
    heads = project.ask("for-each-ref", "--format=%(objectname)", "refs/heads").split()
    return [head for head in dict.fromkeys(heads) if project.blob(head, NUMBER)]


def changes(project: Repository) -> set[tuple[str, bytes]]:
    """The refs of Megatron-LM that a project has built upon, each with the diff that it applied."""
    found: set[tuple[str, bytes]] = set()
    for commit in project.ask("log", "--format=%H", "HEAD", "--", _BUILT, _CHANGE).split():
        built, diff = project.blobs(commit, [_BUILT, _CHANGE])
        named = _REF.search(project.text(built).decode()) if built else None
        if named and diff:
            found.add((named[1], project.text(diff)))
    return found


@dataclass(frozen=True)
class ChangedTree(CommitTree):
    """The tree of a commit in which some files have another text; None is one that is gone."""

    texts: Mapping[str, str | None] = field(kw_only=True)

    def find_module(self, name: str) -> Module | None:
        """The parsed module by its dotted name."""
        file = next((file for file in files(name) if file in self.texts), None)
        if file is None:
            return super().find_module(name)
        text = self.texts[file]
        return None if text is None else parse_module(name, file, text.encode())

    def text(self, file: str) -> str:
        """What a file holds; "" where there is none."""
        if file in self.texts:
            return self.texts[file] or ""
        blob = self.repository.blob(self.commit, file)
        return self.repository.text(blob).decode() if blob else ""


def changed(repository: Repository, commit: str, diff: bytes) -> ChangedTree:
    """The tree of a commit with a diff's part about megatron/core applied to it.

    Raises CalledProcessError where the diff does not fit.
    """
    touched = re.findall(r"^--- a/(megatron/core/\S+)", diff.decode(), re.MULTILINE)
    with TemporaryDirectory() as folder:
        root = Path(folder)
        for file in touched:
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            blob = repository.blob(commit, file)
            if blob:
                (root / file).write_bytes(repository.text(blob))
        command = ["git", "apply", "--include=megatron/core/*", "-"]
        subprocess.run(command, cwd=root, input=diff, check=True, capture_output=True)
        there = {str(path.relative_to(root)): path.read_text() for path in root.rglob("*.py")}
    texts: dict[str, str | None] = dict.fromkeys(touched)
    return ChangedTree(Path(commit), repository=repository, commit=commit, texts=texts | there)


def judged(tree: ChangedTree) -> Iterator[Row]:
    """Every decision about a tree that no commit has."""
    for entry, action in decisions(
        Definitions(tree), packages.build_version_from_constants(tree.text(NUMBER))
    ):
        there = PRESENT[entry](lambda module: tree.text(f"megatron/core/{module.replace('.', '/')}.py"))
        yield Row(tree.commit, entry, action, there)
