"""`python -m bundle` is the command `mcore-bundle`."""

from bundle.cli import main

main()
