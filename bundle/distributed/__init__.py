"""The ranks as one world: the process group, agreement before it exists, and what ends a rank that is stuck."""
