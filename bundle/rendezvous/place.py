"""Where one process stands among those of a job."""

from bundle.frozen import frozen

LOOPBACK = "127.0.0.1"


@frozen
class Rendezvous:
    """Where this process stands, where the ranks meet, and who said so.

    A process that stands for a node starts that node's ranks; its `rank`, `local_rank` and `world_size` are
    None. `per_node` is None where nobody fixed the ranks of a node, `port` where a free one is to be taken.
    """

    nodes: int
    node_rank: int
    address: str
    port: int | None
    source: str
    reason: str
    per_node: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None

    @property
    def is_rank(self) -> bool:
        """Whether this process is one rank, rather than the starter of a node's ranks."""
        return self.rank is not None
