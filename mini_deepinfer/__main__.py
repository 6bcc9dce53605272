"""``python -m mini_deepinfer``."""

import sys

from mini_deepinfer.cli import main

sys.exit(main())
