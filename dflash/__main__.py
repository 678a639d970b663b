"""`python -m dflash`."""

import gc
import sys

from dflash.cli import main

code = main()
gc.freeze()  # with torch loaded, one more search for garbage would take a second of the caller's time
sys.exit(code)
