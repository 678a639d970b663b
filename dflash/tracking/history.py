"""Reading the curves of any run of an MLflow store, ours or not; nothing is written, not even an experiment."""

from __future__ import annotations

from dflash.tracking.store import MetricPoint, prepare_environment, translated


def read_history(uri: str, run_id: str) -> list[MetricPoint]:
    """Every value of every metric of a run, metric after metric.

    Args:
        uri: database or HTTP(S) address of the store.
        run_id: of the run in it.

    Raises:
        TrackingError: there is no such run, or the store does not answer.
    """
    prepare_environment()
    from mlflow.tracking import MlflowClient

    with translated():
        client = MlflowClient(tracking_uri=uri)
        names = sorted(client.get_run(run_id).data.metrics)
        history = [point for name in names for point in client.get_metric_history(run_id, name)]
    return [MetricPoint(str(point.key), float(point.value), int(point.step), int(point.timestamp)) for point in history]
