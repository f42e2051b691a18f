"""`python -m everystop`: the command line."""

import sys

from everystop.cli import main

sys.exit(main())
