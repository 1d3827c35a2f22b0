"""Attention for Apple GPUs, as Metal source that torch compiles (`torch.mps.compile_shader`)."""
