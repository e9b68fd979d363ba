"""What differs on Ascend NPUs and needs torch. torch_npu is not imported: its operators are in torch.ops."""
