"""The scripts of bench/ are no package and not installed; here they can be imported by name."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
