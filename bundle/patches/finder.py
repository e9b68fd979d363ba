"""The program in the `.pth` of `mcore-bundle patches enable`: it waits until megatron.core is imported.

Python runs this text at every start, so the text imports only what every Python has. It does not import
`bundle` either: a program may have a package of that name. `hook` puts the text into the file.
"""

import sys

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without its import
if TYPE_CHECKING:
    from typing import Any


class MegatronCoreFinder:
    """The first finder of all: it lets the others find, and patches when megatron.core is about to run."""

    def __init__(self, document: "Any") -> None:
        self._document = document  # the argument of `hook.enable_patches_from_hook`

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        """Return the spec of megatron.core from the finders behind this one; its loader calls `enable`."""
        if name != "megatron.core" or self not in sys.meta_path:
            return None
        for other in sys.meta_path[sys.meta_path.index(self) + 1 :]:  # type: ignore[arg-type]
            find = getattr(other, "find_spec", None)
            spec = find(name, path, target) if find else None
            if spec is not None and spec.loader is not None:
                spec.loader = _PatchBeforeExecLoader(spec.loader, self)
                return spec
        return None

    def enable_patches(self) -> None:
        """Enable the patches. An error is printed and raised, and megatron.core is not imported."""
        try:
            try:
                from bundle.patches.hook import enable_patches_from_hook
            except ImportError as error:
                raise RuntimeError(
                    f"patches are enabled for {sys.prefix}, but its mcore-bundle cannot be imported"
                    f" ({error}). Install it again, or delete mcore-bundle-patches.pth from site-packages"
                ) from error
            enable_patches_from_hook(self._document)
        except Exception as error:
            # A program for which megatron is optional may swallow the exception.
            print(f"mcore-bundle: megatron.core is not imported: {error}", file=sys.stderr, flush=True)
            raise


class _PatchBeforeExecLoader:
    """The loader that the others found. To look for megatron.core without an import patches nothing."""

    def __init__(self, loader: "Any", finder: MegatronCoreFinder) -> None:
        self._loader, self._finder = loader, finder

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._loader, name)

    def create_module(self, spec: "Any") -> "Any":
        return self._loader.create_module(spec)

    def exec_module(self, module: "Any") -> None:
        self._finder.enable_patches()
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
