"""Directories that look like a search path with packages installed on it, for tests."""

from pathlib import Path

from bundle.environment.packages import InstalledPackages
from bundle.environment.search import build_search_path

LITERALS = 'MAJOR = {}\nMINOR = {}\nPATCH = {}\nPRE_RELEASE = ""\n'


def install(site: Path, name: str, version: str, module: str | None = None, source: str = "") -> Path:
    """Puts a distribution with its metadata and one package on a search path entry."""
    package = site / (module or name.replace("-", "_"))
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(source)
    metadata = site / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return package


def install_torch(site: Path, version: str = "2.13.0", cuda: str | None = None) -> None:
    package = install(site, "torch", version)
    said = f"'{cuda}'" if cuda else "None"
    (package / "version.py").write_text(f"__version__ = '{version}'\ncuda: Optional[str] = {said}\n")


def install_megatron(site: Path, version: str = "0.16.1") -> None:
    install(site, "megatron-core", version, "megatron/core")
    numbers = version.split(".")
    (site / "megatron/core/package_info.py").write_text(LITERALS.format(*numbers))


def stack_of(*sites: Path) -> InstalledPackages:
    return InstalledPackages(build_search_path([str(site) for site in sites], "", sites[0]))
