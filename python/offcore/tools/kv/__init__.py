"""KV-cache transfers measured beside other ways to copy the same blocks."""
