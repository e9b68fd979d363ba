"""The real torch-npu on a machine without CANN or NPUs (make npu-contract). Every result is emulated.

Seen on 2026-11-20, 19 passed, with torch 2.13.0+cpu, torch-npu 2.13.0, MindSpeed core_r0.15.3 (d0d5809d) and
megatron-core 0.15.3: the schema of npu_fusion_attention, its defaults and its result shapes are the emulated
one's; op-plugin refuses the calls that the emulated one refuses, and takes 'tnd' in small letters. MindSpeed
applies 92 patches, attention among them, and lets torch.cuda and Transformer Engine seem to be there.
"""
