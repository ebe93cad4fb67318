"""Entry point of ``python -m arm_recipes``."""

import sys

from arm_recipes.cli.main import main

sys.exit(main())
