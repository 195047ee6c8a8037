"""Experts as blobs, their router, their feed-forward, and the contract with dispatchers."""
