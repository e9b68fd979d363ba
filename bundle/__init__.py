"""Post-train large models with Megatron-Core: detect the machine, patch it, prove it, run the job."""

__version__ = "0.1.0"
