"""What things cost: rooflines, transfers, operators, steps, requests, offload; no torch."""
