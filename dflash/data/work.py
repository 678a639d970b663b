"""Pieces of a data set's building that any process can do: small and picklable, each with everything it needs.

Invariant: a piece gives the same bytes in any process. A worker whose tokenizer differs from the one that the recipe was made
with refuses to work. Hard decision: this module knows neither torch nor the target, so a worker starts in half the time; how
to open the engine that writes answers travels inside the piece, as a function's name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeVar

from dflash.config import Config, TargetConfig
from dflash.data.answers import Answerer
from dflash.data.sources import Progress, SourceFile, UnitSpec, describe_file
from dflash.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_sha256
from dflash.data.units import BuildJob, build_unit, stage_unit
from dflash.errors import TargetError
from dflash.records import UnitRecord

ResultT_co = TypeVar("ResultT_co", covariant=True)

OpenAnswerer = Callable[[Config, Tokenizer], AbstractContextManager[Answerer]]
"""Opens the engine that writes answers; importable by name."""


class Work(Protocol[ResultT_co]):
    """A piece of work: small, picklable, and the same in any process."""

    @property
    def name(self) -> str:
        """What it is, for people."""

    @property
    def rows(self) -> int:
        """About how many rows it reads, for the progress alone."""

    def run(self, *, progress: Progress) -> ResultT_co:
        """Do it here."""


@dataclass(frozen=True, slots=True)
class HashWork:
    """Hash one source file; the result says what it is."""

    uri: str

    @property
    def name(self) -> str:
        """What it is, for people."""
        return f"hash {self.uri.rpartition('/')[2]}"

    @property
    def rows(self) -> int:
        """Unknown before the file is read; each file counts as one."""
        return 1

    def run(self, *, progress: Progress) -> SourceFile:
        """Read the file.

        Raises:
            StorageError: it is missing, or out of this process's reach.
        """
        source = describe_file(self.uri)
        progress("hash files", 1, 1)
        return source


@dataclass(frozen=True, slots=True)
class UnitWork:
    """Build one unit, or tokenize it into one bucket where edges are yet to be measured.

    Attributes:
        edges: upper edges of the buckets; None if they are not known yet.
        open_answerer: needed if `data.answers.regenerate`.
    """

    job: BuildJob
    spec: UnitSpec
    edges: tuple[int, ...] | None
    open_answerer: OpenAnswerer | None

    @property
    def name(self) -> str:
        """What it is, for people."""
        verb = "tokenize" if self.edges is None else "build"
        return f"{verb} {self.spec.source.label} ({self.spec.unit[:8]})"

    @property
    def rows(self) -> int:
        """About how many rows it reads."""
        return self.spec.rows_expected

    def run(self, *, progress: Progress) -> UnitRecord:
        """Do it here; what is finished already is found.

        Raises:
            TargetError: this process loads another tokenizer than the builder.
            DflashError: as `build_unit`.
        """
        config = self.job.config
        tokenizer = _tokenizer_of(config.target.model_dump_json())
        if tokenizer_sha256(tokenizer) != self.job.recipe.tokenizer_sha256:
            raise TargetError(
                f"a worker loads another tokenizer from {config.target.location!r} than the builder of the data set",
                remedy="give every worker the same files of the target and the same release of tokenizers",
            )
        with ExitStack() as stack:
            answerer = None if self.open_answerer is None else stack.enter_context(self.open_answerer(config, tokenizer))
            if self.edges is None:
                return stage_unit(self.spec, job=self.job, tokenizer=tokenizer, answerer=answerer, progress=progress)
            return build_unit(self.spec, job=self.job, edges=self.edges, tokenizer=tokenizer, answerer=answerer, progress=progress)


@lru_cache(maxsize=2)
def _tokenizer_of(target_json: str) -> Tokenizer:
    """Loaded once in a process; one thread, because the processes are the parallelism."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return load_tokenizer(TargetConfig.model_validate_json(target_json))
