"""`offcore gpu bench`: what copies that running kernels ask for cost (docs/gpu-driven.md)."""
