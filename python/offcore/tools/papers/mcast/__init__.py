"""Paper 004's multicast: its claims and figures."""
