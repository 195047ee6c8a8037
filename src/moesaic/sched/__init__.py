"""What runs when: requests, steps, the scheduler and KV bookkeeping. No torch, no clock, no socket."""
