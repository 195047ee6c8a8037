"""KV bytes: pools and tiers. The ledger in sched decides."""
