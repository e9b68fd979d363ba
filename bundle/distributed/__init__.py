"""The ranks as one world: process group, agreement before it exists, and the end of a rank that is stuck."""
