"""Attention of tensors that several devices share, on torch.distributed."""
