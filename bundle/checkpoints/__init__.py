"""Checkpoints: whole or not there, checked before they are read, loadable at any layout.

`checkpoints` and `state` import megatron, which must meet the patches first; so nothing is imported here.
"""
