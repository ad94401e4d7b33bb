"""The stand-in libcuda is built by what lies beside its own tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "fakes"))
