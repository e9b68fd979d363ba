"""What starts the ranks: pure renderers, and the one edge that really starts local processes."""
