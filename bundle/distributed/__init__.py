"""All ranks together: process group, agreement before it exists, and the end of a rank that hangs."""
