"""Multicast collectives simulated, and measured on testbeds."""
