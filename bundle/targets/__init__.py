"""Targets: one module per scheduler renders the job file for that scheduler and talks to it."""
