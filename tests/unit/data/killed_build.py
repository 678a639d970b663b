"""Run as a script: begins a build in the given folder and kills itself (SIGKILL) while the sixth batch is generated."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from workshop import Workshop, many_questions

if __name__ == "__main__":
    place = Workshop(Path(sys.argv[1]), Path(sys.argv[1]) / "target")

    def suicidal(prompts: list[list[int]], keys: list[str]) -> list[list[int]]:
        """Answer five batches of two."""
        if len(place.target.batches) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return place.target(prompts, keys)

    place.prepare(many_questions(place), generate=suicidal)
