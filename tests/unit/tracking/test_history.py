"""Reading any run of an MLflow store leaves it as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash.errors import TrackingError
from dflash.tracking import read_history
from dflash.tracking.store import MetricPoint, Store


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One store for all tests: a new one costs seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


def test_every_value_comes_back_and_nothing_is_created(uri: str, tmp_path: Path) -> None:
    store = Store(uri, experiment="theirs", artifact_root=tmp_path)
    run_id = store.begin_run(name="x", tags={})
    points = [MetricPoint(name, float(step), step, 1000 + step) for name in ("b", "a/c") for step in range(30)]
    store.log_metrics(run_id, points)
    assert sorted(read_history(uri, run_id), key=lambda p: (p.name, p.step)) == sorted(points, key=lambda p: (p.name, p.step))
    from mlflow.tracking import MlflowClient

    names = {experiment.name for experiment in MlflowClient(tracking_uri=uri).search_experiments()}
    assert names == {"Default", "theirs"}


def test_a_run_that_is_not_there_is_an_error(uri: str) -> None:
    with pytest.raises(TrackingError):
        read_history(uri, "none")
