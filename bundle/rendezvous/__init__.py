"""Who started us: which node and which rank this process is, and where the ranks meet."""

from bundle.rendezvous.discovery import Rendezvous, discover
from bundle.rendezvous.hosts import LOOPBACK

__all__ = ["LOOPBACK", "Rendezvous", "discover"]
