"""Host names, ports and endpoints; what a shell or a parser could take for something else is refused."""

import ipaddress
import re

# torchrun's own default, which is what PET_MASTER_PORT means when it is not set.
DEFAULT_PORT = 29500

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
_GROUP = re.compile(r"\[([0-9]+)[^][]*\]", re.ASCII)


def number(text: str) -> int | None:
    """Returns the plain decimal number that `text` is, or None: no sign, blank or foreign digit."""
    return int(text) if _NUMBER.fullmatch(text) else None


def port(text: str) -> int | None:
    """Returns a TCP port that a client can connect to, or None."""
    value = number(text)
    return value if value is not None and 0 < value < 2**16 else None


def host(text: str) -> str | None:
    """Returns a host name, an IPv4 or an IPv6 address (brackets removed), or None."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        return str(ipaddress.ip_address(bare)) if "%" not in bare else None
    except ValueError:
        return text if len(text) <= 253 and _NAME.fullmatch(text) else None


def endpoint(text: str) -> tuple[str, int] | None:
    """Returns (host, port) of `HOST:PORT` or `[IPv6]:PORT`, or None."""
    name, colon, digits = text.rpartition(":")
    where, at = host(name), port(digits)
    if not colon or where is None or at is None or (":" in where) != name.startswith("["):
        return None
    return where, at


def first_of(nodelist: str) -> str | None:
    """Returns the first host of a SLURM node list such as `gpu[001-003,10],login1`, or None.

    Only the first host of a list is ever needed, and `scontrol show hostnames` is fatal without a slurm.conf.
    """
    if len(nodelist) > 1_000_000:
        return None
    outside, depth = "", 0
    for letter in nodelist:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            break
        outside += letter
    return host(_GROUP.sub(r"\1", outside))
