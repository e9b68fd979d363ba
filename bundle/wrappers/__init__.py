"""The replacement functions of the patches, one module for each upstream area.

Each is `wrapper(original) -> replacement`, calls `original`, and copies nothing of it.
"""
