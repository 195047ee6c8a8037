"""Figures that texts on MoE inference state, recomputed by the code that plans and runs."""
