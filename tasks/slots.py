"""A flow run's slot of its deployment (`concurrency_limit`), and what its loss means: nothing for the work that is being done.

Prefect renews a slot every few minutes, and ends the flow run if that fails: after a server was away for minutes, or, where it
keeps slots in memory (`prefect.toml` says otherwise), has only been started again. A training would be lost to that. Here a
lost slot costs a warning, and a second flow run that starts because of it is refused by the lock of the run or of the devices.
"""

from __future__ import annotations

import logging
from typing import Any

from prefect import flow_engine

logger = logging.getLogger(__name__)

KEEPER = "maintain_concurrency_lease"
MARK = "_dflash_outlives_slot"
"""Attribute that the wrapped function carries, so that it is wrapped once."""


def outlive_lost_slots() -> None:
    """Let flow runs of this process go on when their slot is lost; a Prefect that keeps slots in another way is left alone."""
    stock = getattr(flow_engine, KEEPER, None)
    if stock is None:
        logger.warning("this Prefect has no %s: a flow run may end when its deployment's slot cannot be renewed", KEEPER)
        return
    if hasattr(stock, MARK):
        return

    def keeper(*arguments: Any, **options: Any) -> Any:
        return stock(*arguments, **(options | {"raise_on_lease_renewal_failure": False}))

    setattr(keeper, MARK, True)
    setattr(flow_engine, KEEPER, keeper)
