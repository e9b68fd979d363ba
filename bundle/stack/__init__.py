"""What is installed: versions, commits and paths, by metadata and source text, never by import."""

from bundle.stack.megatron import Copy, Megatron
from bundle.stack.search import SearchPath, search_path
from bundle.stack.stack import PACKAGES, Package, Stack, detect
from bundle.stack.versions import base

__all__ = ["PACKAGES", "Copy", "Megatron", "Package", "SearchPath", "Stack", "base", "detect", "search_path"]
