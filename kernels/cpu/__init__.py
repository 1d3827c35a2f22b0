"""Attention on CPUs: one loop in portable C++, a table of primitives per instruction set."""
