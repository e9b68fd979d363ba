"""A bare Megatron-LM repository as source trees: one commit's modules, parsed once for each blob."""

import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bundle.patches.source import Module, SourceTree, parse_module

SINCE = "2025-04-04"  # 0.12's branch point: what is older is not supported


class Repository:
    """Commits and blobs, asked of two long-lived git processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._checking = self._process("--batch-check=%(objectname) %(objecttype)")
        self._reading = self._process("--batch")
        self._text: dict[str, bytes] = {}
        self._modules: dict[tuple[str, str], Module] = {}
        self._commit = ""  # the one asked for last, and what is known of it
        self._blobs: dict[str, str | None] = {}

    def _process(self, option: str) -> subprocess.Popen[bytes]:
        command = ["git", "--git-dir", str(self.path), "cat-file", option]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def close(self) -> None:
        """Ends the processes."""
        for process in (self._checking, self._reading):
            process.communicate()

    def commits(self, branch: str) -> list[str]:
        """The first-parent commits of a branch since the oldest release branched off, newest first."""
        arguments = ["rev-list", "--first-parent", f"--since={SINCE}", branch, "--"]
        return self.ask(*arguments).split()

    def releases(self) -> set[str]:
        """The commits that are tagged as a release, and no candidate for one."""
        lines = self.ask(
            "for-each-ref", "--format=%(refname:short) %(objectname) %(*objectname)", "refs/tags"
        )
        named = [line.split() for line in lines.splitlines()]
        return {ids[-1] for name, *ids in named if name.startswith("core_v") and "rc" not in name}

    def head(self, branch: str) -> str | None:
        """The newest commit of a branch; None where there is no such branch."""
        command = [
            "git",
            "--git-dir",
            str(self.path),
            "rev-parse",
            "--verify",
            "--quiet",
            f"{branch}^{{commit}}",
        ]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None

    def blob(self, commit: str, file: str) -> str | None:
        """The id of a file in a commit; None where the commit does not have it."""
        (blob,) = self.blobs(commit, [file])
        return blob

    def blobs(self, commit: str, files: Sequence[str]) -> tuple[str | None, ...]:
        """The ids of files in a commit, all asked for at once."""
        known = self._blobs if commit == self._commit else {}
        self._commit, self._blobs = commit, known
        new = [file for file in files if file not in known]
        answers = self._lines(self._checking, [f"{commit}:{file}" for file in new])
        for file, answer in zip(new, map(str.split, answers), strict=True):
            known[file] = answer[0] if len(answer) == 2 and answer[1] == "blob" else None
        return tuple(known[file] for file in files)

    def text(self, blob: str) -> bytes:
        """What a blob holds."""
        if blob not in self._text:
            (header,) = self._lines(self._reading, [blob])
            size = int(header.split()[2])
            assert self._reading.stdout is not None
            self._text[blob] = self._reading.stdout.read(size)
            self._reading.stdout.read(1)
        return self._text[blob]

    def module(self, name: str, file: str, blob: str) -> Module:
        """A blob, parsed as the module of that name."""
        if (name, blob) not in self._modules:
            self._modules[name, blob] = parse_module(name, file, self.text(blob))
        return self._modules[name, blob]

    def ask(self, *arguments: str) -> str:
        command = ["git", "--git-dir", str(self.path), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    @staticmethod
    def _lines(process: subprocess.Popen[bytes], asked: Sequence[str]) -> list[str]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("".join(f"{line}\n" for line in asked).encode())
        process.stdin.flush()
        return [process.stdout.readline().decode() for _ in asked]


@dataclass(frozen=True)
class CommitTree(SourceTree):
    """The source tree of one commit."""

    repository: Repository = field(kw_only=True)
    commit: str = field(kw_only=True)

    def find_module(self, name: str) -> Module | None:
        """The parsed module by its dotted name; None where the commit has no such file."""
        if name not in self._modules:
            for file in files(name):
                blob = self.repository.blob(self.commit, file)
                if blob is not None:
                    self._modules[name] = self.repository.module(name, file, blob)
                    break
            else:
                self._modules[name] = None
        return self._modules[name]


def files(module: str) -> Iterator[str]:
    """The files that a module may be, as Python looks for them."""
    stem = module.replace(".", "/")
    yield from (f"{stem}/__init__.py", f"{stem}.py")
