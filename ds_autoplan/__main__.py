"""`python -m ds_autoplan`: the same as `ds-autoplan`."""

import sys

from ds_autoplan.cli import main

sys.exit(main())
