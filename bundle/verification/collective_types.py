"""The types of tensors that collectives add up and move.

torch-npu's ProcessGroupHCCL also adds up int16, and float64 on Atlas A5 alone. The engine uses neither.
"""

REDUCED_TYPES = ("int8", "int32", "int64", "float16", "bfloat16", "float32")
MOVED_TYPES = (*REDUCED_TYPES, "uint8", "bool", "float64")
