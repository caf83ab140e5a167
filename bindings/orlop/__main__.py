"""python -m orlop: the command `orlop`."""

import sys

from .cli import main

sys.exit(main())
