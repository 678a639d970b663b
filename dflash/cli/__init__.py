"""The command line: the same functions as the Prefect tasks, without a server.

Exit codes: 0 ok, 1 user error, 2 usage, 3 watch, 4 unhealthy, 5 blind, 21 halted, 23 too many non-finite updates,
24 stopped on request, 25 trainer crashed, 26 not lossless, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from dflash.cli import (
    balance_commands,
    checkpoint_commands,
    config_commands,
    data_commands,
    doctor_commands,
    evaluate_commands,
    export_commands,
    health_commands,
    join_commands,
    probe_commands,
    publish_commands,
    trace_commands,
    train_commands,
)
from dflash.cli.output import configure_logging
from dflash.errors import EXIT_OK, EXIT_SIGINT, DflashError, as_storage_error
from dflash.evaluate.text import terminal_text, to_nowhere

COMMANDS = (
    data_commands,
    doctor_commands,
    balance_commands,
    train_commands,
    join_commands,
    health_commands,
    trace_commands,
    checkpoint_commands,
    probe_commands,
    evaluate_commands,
    export_commands,
    publish_commands,
    config_commands,
)
"""In the order of the help. None imports torch until a command that needs it runs: a verdict is wanted within a second."""


def build_parser() -> argparse.ArgumentParser:
    """The whole command tree."""
    parser = argparse.ArgumentParser(
        prog="python -m dflash",
        description="Train a DFlash drafter for a frozen target LLM, and know that the run is healthy.",
        epilog=f"Exit codes: {(__doc__ or '').split('Exit codes: ')[1].strip()}",
    )
    groups = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.register(groups)
    return parser


def _parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command; overrides may also stand behind options, where argparse takes no further positional argument."""
    arguments, rest = parser.parse_known_args(argv)
    if rest and not (hasattr(arguments, "overrides") and all("=" in word and not word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def main(argv: Sequence[str] | None = None, *, own_process: bool = False) -> int:
    """Run one command and return its exit code.

    Args:
        argv: words of the command; those of the process if None.
        own_process: the process is there for this command alone, which may change what cannot be undone, such as its priority.
    """
    arguments = _parsed(build_parser(), argv)
    arguments.own_process = own_process
    configure_logging(arguments.verbose)
    try:
        code: int = arguments.run(arguments)
    except DflashError as error:
        return _told(arguments, error)
    except BrokenPipeError:  # the reader has seen enough of something that is printed piece by piece
        to_nowhere(sys.stdout)
        return EXIT_OK
    except OSError as error:
        known = as_storage_error(error)
        if known is None:
            raise
        return _told(arguments, known)
    except KeyboardInterrupt:
        print("interrupted; run the same command again", file=sys.stderr)
        return EXIT_SIGINT
    return code


def _told(arguments: argparse.Namespace, error: DflashError) -> int:
    if arguments.json:
        print(json.dumps({"error": type(error).__name__, "what": error.what, "remedy": error.remedy}))
    print(f"error: {terminal_text(str(error))}", file=sys.stderr)
    return error.exit_code
