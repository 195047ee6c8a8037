"""Simulations: what a mechanism does to made-up traffic, counted instead of believed."""
