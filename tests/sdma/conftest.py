"""Random programs come from the property tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "property"))
