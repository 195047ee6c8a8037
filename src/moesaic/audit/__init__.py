"""The functions behind inspect, verify, bench and their like."""
