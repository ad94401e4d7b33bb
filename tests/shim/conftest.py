"""The stand-in libraries are built by what lies beside their own tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "fakes"))
