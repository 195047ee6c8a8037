"""One door per op, and the implementations behind it."""
