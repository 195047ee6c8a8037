"""Checkpoints and model families: maths that reads as maths."""
