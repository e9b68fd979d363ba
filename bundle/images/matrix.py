"""The jobs of the build workflow, from what `bake --print` says: one for each image and platform."""

from collections.abc import Mapping

from bundle.errors import UsageError
from bundle.images.plan import Planned, json_object

# Native machines: an emulated build of torch extensions takes a day.
RUNNERS = {"linux/amd64": "ubuntu-24.04", "linux/arm64": "ubuntu-24.04-arm"}


def matrix(
    plan: Mapping[str, Planned], now: Mapping[str, str], before: Mapping[str, str]
) -> list[dict[str, str]]:
    """[{target, platform, runner}] of every image whose inputs are not what they were `before`.

    `now` and `before` are target -> digest. Raises UsageError with every platform that nobody can build for.
    """
    changed = [name for name in plan if name not in now or now[name] != before.get(name)]
    jobs = [(name, platform) for name in changed if plan[name].tags for platform in _platforms(plan[name])]
    lost = sorted({f"{name}: {platform[:40]!r}" for name, platform in jobs if platform not in RUNNERS})
    if lost:
        raise UsageError(f"no runner for a platform; there are {', '.join(RUNNERS)}", lost[:50])
    return [{"target": name, "platform": platform, "runner": RUNNERS[platform]} for name, platform in jobs]


def digests(document: str, origin: str) -> dict[str, str]:
    """Target -> digest, from what `images fingerprint --json` printed. Raises UsageError."""
    found = json_object(document, origin)
    if not all(isinstance(digest, str) for digest in found.values()):
        raise UsageError(f"{origin}: must be {{target: digest}}")
    return found


def _platforms(target: Planned) -> list[str]:
    return target.platforms or ["linux/amd64"]
