"""Random programs come from the property tests, stand-ins from the conformance suite."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("property", "conformance")]
