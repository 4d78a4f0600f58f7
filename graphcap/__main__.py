"""``python -m graphcap`` is the console script."""

import sys

from graphcap.cli import main

sys.exit(main())
