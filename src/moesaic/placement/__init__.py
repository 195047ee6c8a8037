"""Which expert lives where, which replica takes a token, when to move: algorithms on arrays, no torch."""
