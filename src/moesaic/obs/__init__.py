"""Metrics, traces, expert load and alerts. No torch."""
