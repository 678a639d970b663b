"""`python -m dflash`, and the installed command `dflash`."""

import gc
import sys

from dflash.errors import EXIT_SIGINT


def run() -> int:
    """The command line as a whole process; returns its exit code."""
    try:
        from dflash.cli import main  # takes a second, in which a person may think better of it

        code = main(own_process=True)
    except KeyboardInterrupt:
        return EXIT_SIGINT
    gc.freeze()  # with torch loaded, one more search for garbage would take a second of the caller's time
    return code


if __name__ == "__main__":
    sys.exit(run())
