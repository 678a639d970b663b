"""The workers of a Dask or Ray cluster, as something that carries out pieces of a data set: each one a task run.

Hard decision: the cluster is opened for one data set and not for the flow, so that training never holds it. One that is
started here listens on 127.0.0.1 only, without a dashboard, and ends with the data set; one that is named by its address is
left running. A piece whose worker is killed is given to another one by the engine itself, three times at most.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from prefect.futures import as_completed
from prefect.task_runners import TaskRunner

from dflash.config import DataConfig
from dflash.data.work import Work
from dflash.errors import ConfigError, DataError
from dflash.stages import Spread
from tasks.data_piece import carry_out

ResultT = TypeVar("ResultT")
OBJECT_STORE_BYTES = 100 * 2**20
"""Memory that a local Ray instance sets aside for results, which are small here."""


@contextmanager
def open_spread(data: DataConfig) -> Iterator[Spread]:
    """The workers that `data.runner` names, as something that carries out pieces of work.

    Raises:
        ConfigError: the engine's packages are not installed.
    """
    make, lost = {"dask": _dask, "ray": _ray}[data.runner](data)
    with make() as runner:

        def spread(work: Sequence[Work[ResultT]]) -> Iterator[tuple[int, ResultT]]:
            futures = {
                runner.submit(carry_out, parameters={"name": piece.name, "work": piece}): place for place, piece in enumerate(work)
            }
            for future in as_completed(list(futures)):
                place = futures[future]
                try:
                    result = future.result()
                    if isinstance(result, lost):  # Ray hands some of its errors over as results
                        raise result
                except lost as error:
                    raise DataError(
                        f"the workers that did `{work[place].name}` were killed, or could not start: {error}",
                        remedy="look for an out-of-memory kill in the workers' log; fewer data.workers need less memory, "
                        "and the next build goes on with what is not finished",
                    ) from error
                yield place, result

        yield spread


def _dask(data: DataConfig) -> tuple[Callable[[], TaskRunner[Any]], type[Exception]]:
    os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "warning")  # read when the package is imported, here and by workers
    try:
        from distributed.scheduler import KilledWorker
        from prefect_dask import DaskTaskRunner
    except ImportError as error:
        raise _missing("dask", error) from error
    if data.runner_address is not None:
        return lambda: DaskTaskRunner(address=data.runner_address), KilledWorker
    here: dict[str, Any] = {"n_workers": data.workers, "threads_per_worker": 1, "processes": True, "host": "127.0.0.1"}
    here |= {"dashboard_address": "127.0.0.1:0", "scheduler_kwargs": {"dashboard": False}}
    return lambda: DaskTaskRunner(cluster_kwargs=here), KilledWorker


def _ray(data: DataConfig) -> tuple[Callable[[], TaskRunner[Any]], type[Exception]]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if data.runner_address is None:
        # Ray's switch against firewall pop-ups on other systems; here it is what keeps every server on 127.0.0.1.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    try:
        from prefect_ray import RayTaskRunner
        from ray.exceptions import RayError
    except ImportError as error:
        raise _missing("ray", error) from error
    if data.runner_address is not None:
        return lambda: RayTaskRunner(address=data.runner_address), RayError
    here = {"num_cpus": data.workers, "include_dashboard": False}
    here |= {"object_store_memory": OBJECT_STORE_BYTES, "logging_level": logging.WARNING}
    return lambda: RayTaskRunner(init_kwargs=here), RayError


def _missing(engine: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f"data.runner is {engine!r}, but a package for it is not installed ({error})",
        remedy=f"python -m pip install --constraint constraints.txt --editable '.[{engine}]', or set data.runner: local",
    )
