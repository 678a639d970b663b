"""`python -m dflash`, and the installed command `dflash`."""

import gc
import sys

from dflash.cli import main


def run() -> int:
    """The command line as a whole process; returns its exit code."""
    code = main(own_process=True)
    gc.freeze()  # with torch loaded, one more search for garbage would take a second of the caller's time
    return code


if __name__ == "__main__":
    sys.exit(run())
