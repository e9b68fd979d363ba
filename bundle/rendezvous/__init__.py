"""Who started us: which node and which rank this process is, and where the ranks meet.

`discovery.discover` finds out; what only draws a plan needs no more than the answer's type.
"""

from bundle.rendezvous.place import LOOPBACK, Rendezvous

__all__ = ["LOOPBACK", "Rendezvous"]
