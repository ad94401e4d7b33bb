"""SDMA packets as text, and run on emulated engines."""
