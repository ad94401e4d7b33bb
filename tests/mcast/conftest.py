"""Tests of multicast share fabrics.py, and those with arrays on GPUs the stand-in driver."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / name) for name in ("fakes", "cuda")]
