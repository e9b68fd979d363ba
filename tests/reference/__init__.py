"""Language models in plain PyTorch, written from the published formulas and read from a Hugging Face config.

One unpacked sequence at a time, in float64. Nothing here but the tests of it imports bundle, and nothing
megatron: what a numeric test takes from here shares no line with what it checks, the reading of the config
included.
"""
