"""Files of other engines, read for what they say. No torch, no weights."""
