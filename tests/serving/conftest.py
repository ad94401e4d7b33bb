"""Adapters run on the stand-in driver, too."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / name) for name in ("fakes", "cuda")]
