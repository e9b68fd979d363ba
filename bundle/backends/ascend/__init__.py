"""The ascend backend: megatron-core with MindSpeed and torch-npu over HCCL."""
