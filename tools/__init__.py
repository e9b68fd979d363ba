"""What maintains this repository and is not shipped: the images' definition and locks, and generated pages.

Run from a checkout in which the package is installed, as `python -m tools.NAME`.
"""
