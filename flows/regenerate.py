"""On-policy answers alone: the target answers a corpus once, for any number of data sets."""

from __future__ import annotations

import sys
from typing import Annotated

from prefect import flow
from pydantic import Field

from flows.parameters import ConfigPath, Overrides, check, command_line
from flows.settings import flow_settings
from tasks.local import run_program
from tasks.regenerate_answers import regenerate_answers

OutputFile = Annotated[str, Field(pattern=r"\.jsonl(\.gz)?$", description="Conversation file to write, local or `s3://`.")]


@flow(name="regenerate", **flow_settings())
def regenerate(config: ConfigPath, overrides: Overrides | None = None, output: OutputFile | None = None) -> str:
    """Let the target (in process, or at a server) answer every prompt of a corpus. Returns the conversation file.

    Args:
        config: configuration file, relative to the checkout.
        overrides: dotted assignments on top of it.
        output: conversation file to write; `<run.root>/answers/<run.name>.jsonl` if absent.
    """
    return regenerate_answers(config, overrides=overrides or [], output=output).output


def main() -> int:
    """Command line of the flow; returns the exit code."""
    parser = command_line("Let the target answer the prompts of a corpus.")
    parser.add_argument("--output", help="conversation file to write: .jsonl or .jsonl.gz, local or s3://")
    arguments = parser.parse_args()

    def body() -> None:
        print(regenerate(arguments.config, arguments.overrides, arguments.output))

    return run_program(body, check=lambda: check(arguments))


if __name__ == "__main__":
    sys.exit(main())
