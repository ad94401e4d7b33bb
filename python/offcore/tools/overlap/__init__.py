"""Overlap measured on simulated cores: the interference model, strategies by combination, plots."""
