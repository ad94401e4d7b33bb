"""Hosts and switches of network namespaces on one machine."""
