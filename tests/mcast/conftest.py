"""Tests of multicast share fabrics.py."""
