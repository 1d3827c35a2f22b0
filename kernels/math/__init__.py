"""Attention as a composite of torch operations."""
