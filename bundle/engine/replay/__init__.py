"""Router replay: the experts that one forward pass chose, recorded, and chosen again in another."""

from bundle.engine.replay.routes import Routes, Routing, dtype_of, joined

__all__ = ["Routes", "Routing", "dtype_of", "joined"]
