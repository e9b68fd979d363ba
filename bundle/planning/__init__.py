"""All that will happen, before it happens: layout, memory, patches, environment, and what is against it."""

from bundle.planning.document import document
from bundle.planning.plan import Plan, Target, make
from bundle.planning.render import text

__all__ = ["Plan", "Target", "document", "make", "text"]
