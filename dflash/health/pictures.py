"""All pictures of a report, drawn once: for the page, for MLflow and for Prefect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash.health.history import History
from dflash.health.pipeline_plots import draw_machinery
from dflash.health.probe_plot import draw_probes
from dflash.health.report_plots import Picture, draw_buckets, draw_gradient, draw_overview
from dflash.records import Finding


@dataclass(frozen=True, slots=True)
class Pictures:
    """What a report shows.

    Attributes:
        loss: the overview; empty for an empty log.
        machinery: acceptance length, gradient norm, step time, queues, target workers, runs of one bucket; what the log has numbers
            for.
        buckets: one a bucket.
    """

    loss: tuple[Picture, ...]
    machinery: tuple[Picture, ...]
    buckets: tuple[Picture, ...]

    def to_keep(self) -> tuple[Picture, ...]:
        """Those worth a file of their own."""
        return (*self.loss, *self.machinery)


@np.errstate(over="ignore", invalid="ignore")  # an axis may reach beyond the largest number
def draw_pictures(history: History, findings: Sequence[Finding]) -> Pictures:
    """Draw everything that `history` has numbers for, with `findings` marked."""
    overview, gradient = draw_overview(history, findings), draw_gradient(history, findings)
    probes = draw_probes(history, findings)
    first = tuple(picture for picture in (probes, gradient) if picture is not None)
    return Pictures(
        loss=() if overview is None else (overview,),
        machinery=(*first, *draw_machinery(history, findings)),
        buckets=tuple(draw_buckets(history, findings)) if overview is not None else (),
    )
