"""How the tensors of a version reach a server."""
