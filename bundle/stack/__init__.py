"""What is installed: versions, commits and paths, by metadata and source text, never by import."""
