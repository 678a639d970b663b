"""A look at a plan before any run: what the configured plan does with a data set. Nothing is written."""

from __future__ import annotations

from dataclasses import dataclass

from dflash.config import Config
from dflash.data.plan import survey_plan
from dflash.data.plan_picture import draw_plan
from dflash.data.plan_stats import PlanStats, plan_stats
from dflash.data.reader import SampleStore
from dflash.evaluate.text import aligned
from dflash.records import PlanManifest


@dataclass(frozen=True, slots=True)
class PlanSurvey:
    """A plan in numbers.

    Attributes:
        manifest: of the whole plan, all epochs.
        stats: of its first epoch.
    """

    manifest: PlanManifest
    stats: PlanStats

    def picture(self) -> bytes:
        """PNG of the first epoch."""
        return draw_plan(self.stats, self.manifest)


def survey_stage(config: Config, *, location: str, fingerprint: str | None) -> PlanSurvey:
    """Plan a data set as configured, all epochs one after another, and keep the numbers.

    Args:
        config: its `plan`, `run.seed` and `train.epochs` determine the plan.
        location: a complete data set, local or `s3://`.
        fingerprint: which version of it; the newest if None.

    Raises:
        DataError: the data set is incomplete, or a sample fits no batch.
    """
    with SampleStore(location, fingerprint=fingerprint, reader=config.data.reader) as store:
        manifest, first = survey_plan(config, store, data_fingerprint=store.manifest.fingerprint)
        return PlanSurvey(manifest, plan_stats(store.lengths, first, edges=store.manifest.edges_tokens))


def survey_table(survey: PlanSurvey) -> str:
    """The numbers as a table with a line for every bucket."""
    stats, manifest = survey.stats, survey.manifest
    head = ("bucket", "<= tokens", "samples", "tokens", "batches", "padded tokens", "efficiency", "share", "longest run", "ends")
    rows = [
        (
            str(b.bucket), str(b.edge_tokens), f"{b.samples:,}", f"{b.tokens:,}", f"{b.batches:,}", f"{b.padded_tokens:,}",
            f"{b.efficiency:.4f}", f"{b.batch_share:.1%}", str(b.longest_run), f"-{b.last_strides:.2f}",
        )
        for b in stats.buckets
    ]  # fmt: skip
    total = (
        "all", "", f"{stats.samples:,}", f"{stats.tokens:,}", f"{stats.batches:,}", f"{stats.padded_tokens:,}",
        f"{stats.efficiency:.4f}", "", str(stats.longest_run), "",
    )  # fmt: skip
    runs = ", ".join(f"{count:,} of {length}" for length, count in stats.run_counts[:8])
    more = "" if len(stats.run_counts) <= 8 else f", and longer ones up to {stats.longest_run}"
    longest = f"longest run over all {manifest.epochs} epochs: {manifest.longest_bucket_run}"
    others = (
        f"random batches of 16 would reach {stats.naive_efficiency:.4f}, padding to the bucket edges {stats.edges_efficiency:.4f}"
    )
    return "\n".join(
        [
            *aligned((head, *rows, total), left=0),
            "ends: strides (all batches / the bucket's) between a bucket's last batch and the epoch's end",
            f"order {manifest.settings['order']}: {manifest.bucket_run_note}; {longest}",
            f"runs in the first epoch: {runs}{more}",
            f"padded lengths: {len(stats.padded_lengths_tokens)} distinct, at most {max(stats.padded_lengths_tokens)} tokens",
            f"efficiency of all epochs {manifest.padding_efficiency:.4f}; {others}",
        ]
    )
