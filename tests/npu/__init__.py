"""The real torch-npu on a machine without CANN or NPUs (make npu-contract). Every result is emulated.

Seen on 2026-11-20, 19 passed, with torch 2.13.0+cpu, torch-npu 2.13.0, MindSpeed core_r0.15.3 (d0d5809d) and
megatron-core 0.15.3: the schema of npu_fusion_attention, its defaults and its result shapes are the emulated
one's; op-plugin refuses the calls that the emulated one refuses, and takes 'tnd' in small letters. MindSpeed
applies 92 patches, attention among them, and lets torch.cuda and Transformer Engine seem to be there.

Seen on 2026-11-22 with torch 2.13.0+cpu and torch-npu 2.13.0, file by file: what is emulated computes, and
refuses, as `probing` says; tiny models train with the losses of the cpu on megatron-core 0.16.1, 0.12.3 and
0.19.2, from checkpoints and with routes of others too, and the demo through the command line (`training`,
`test_features`, `test_job`). Through MindSpeed (core_r0.15.3 at d0d5809d and core_r0.16.0 at e4772499
with megatron-core 0.15.3 and 0.16.1, 26.1.0_core_r0.12.1 at 57a33053 with Megatron-LM core_v0.12.1) tiny
models train so on one rank, and but for core_r0.16.0 on two, go on from a checkpoint, and the demo runs
(`test_mindspeed`).
"""
