"""Arithmetic on facts: parameters, FLOPs, memory, traffic. No torch."""
