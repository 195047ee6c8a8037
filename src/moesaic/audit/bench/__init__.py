"""Measure throughput and latency: workload, clients, timing, figures. The verb is `moesaic bench`."""
