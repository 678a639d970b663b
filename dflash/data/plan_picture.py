"""A plan's picture: lengths with the bucket edges, padding of every bucket, runs of one bucket, the mix over the epoch.

matplotlib is imported only when a picture is drawn, and without its global state.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash.data.plan_stats import BucketPlan, PlanStats
from dflash.records import PlanManifest

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _FAINT, _BLUE, _ORANGE = "#1f2933", "#d9dee5", "#2f6db3", "#d9772b"
_FIRST, _LAST = np.array([0.80, 0.87, 0.95]), np.array([0.07, 0.25, 0.47])
_SIZE_INCHES = (11.0, 7.6)
_DPI = 130
_MOST_EDGE_LABELS = 12
_MOST_RUN_BARS = 12


def draw_plan(stats: PlanStats, manifest: PlanManifest) -> bytes:
    """The picture of one epoch as PNG."""
    # The object interface: pyplot would keep every figure alive and pick a display's backend.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    _draw_lengths(axes[0, 0], stats)
    _draw_padding(axes[0, 1], stats)
    _draw_runs(axes[1, 0], stats, manifest)
    _draw_mix(axes[1, 1], stats)
    for place in axes.flat:
        place.spines[["top", "right"]].set_visible(False)
        place.title.set_fontsize(11)
        place.tick_params(labelsize=9)
    kept = "kept" if manifest.bucket_run_feasible else f"not feasible, {manifest.bucket_run_limit} kept"
    if not manifest.bucket_run_limit:
        kept = "not kept by this order"
    figure.suptitle(
        f"One epoch: {stats.samples:,} samples in {stats.batches:,} batches, padding efficiency {stats.efficiency:.1%} "
        f"(random batches {stats.naive_efficiency:.0%}, bucket edges alone {stats.edges_efficiency:.0%})\n"
        f"order {manifest.settings['order']}; run limit {manifest.settings['max_bucket_run']} ({kept}); "
        f"{len(stats.padded_lengths_tokens)} padded lengths",
        fontsize=11,
        color=_INK,
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _draw_lengths(axes: Axes, stats: PlanStats) -> None:
    edges = np.array(stats.length_edges)
    axes.bar(edges[:-1], stats.length_counts, width=np.diff(edges), align="edge", color=_BLUE, linewidth=0)
    axes.set_xscale("log")
    axes.set_xlim(edges[0], edges[-1] * 1.02)
    axes.set_ylim(0, max(stats.length_counts) * 1.18)
    axes.minorticks_off()
    shown = [bucket.edge_tokens for bucket in stats.buckets]
    for edge in shown:
        axes.axvline(min(edge, edges[-1]), color=_ORANGE, linewidth=1.2)
    if len(shown) <= _MOST_EDGE_LABELS:
        axes.set_xticks([edges[0], *shown], [f"{int(edges[0])}", *map(str, shown)], rotation=45, ha="right")
    axes.set_xlim(edges[0], max(edges[-1], shown[-1]) * 1.02)
    axes.set_title("Lengths of the samples, and the bucket edges")
    axes.set_xlabel("tokens (logarithmic)")
    axes.set_ylabel("samples")


def _draw_padding(axes: Axes, stats: PlanStats) -> None:
    places = np.arange(len(stats.buckets))
    padding = [100 * (1 - bucket.efficiency) for bucket in stats.buckets]
    bars = axes.bar(places, padding, width=0.7, color=_shades(len(places)), zorder=2)
    labels = axes.bar_label(bars, [f"{value:.1f} %" for value in padding], padding=3, fontsize=9, zorder=3)
    for label in labels:
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8})
    mean = 100 * (1 - stats.efficiency)
    axes.axhline(mean, color=_ORANGE, linewidth=1.2, linestyle="--", zorder=1, label=f"all buckets: {mean:.2f} %")
    axes.legend(fontsize=9, frameon=False, loc="upper right")
    axes.set_ylim(0, max([*padding, mean, 0.1]) * 1.25)
    axes.set_xticks(places, [_label(bucket) for bucket in stats.buckets], fontsize=8)
    axes.set_title("Padding of every bucket")
    axes.set_xlabel("bucket, its upper edge in tokens, its share of the batches")
    axes.set_ylabel("padded tokens that are padding (%)")


def _draw_runs(axes: Axes, stats: PlanStats, manifest: PlanManifest) -> None:
    limit, found = int(manifest.settings["max_bucket_run"]), dict(stats.run_counts)
    # Lengths up to the limit have their place even where no run has them: what is absent is to be seen.
    lengths = sorted({*found, *range(1, min(limit, _MOST_RUN_BARS) + 1)})
    runs = [(length, found.get(length, 0)) for length in lengths]
    shown, beyond = runs[:_MOST_RUN_BARS], runs[_MOST_RUN_BARS:]
    counts = [count for _, count in shown] + ([sum(count for _, count in beyond)] if beyond else [])
    labels = [str(length) for length, _ in shown] + ([f"> {shown[-1][0]}"] if beyond else [])
    colours = [_BLUE if length <= limit else _ORANGE for length, _ in shown] + ([_ORANGE] if beyond else [])
    places = np.arange(len(counts))
    bars = axes.bar(places, counts, width=0.7, color=colours, bottom=0)
    axes.bar_label(bars, [f"{count:,}" if count else "" for count in counts], padding=2, fontsize=9)
    for place, count in enumerate(counts):
        if not count:
            axes.text(place, 0.6, "none", ha="center", va="bottom", fontsize=9)
    axes.set_xticks(places, labels)
    axes.set_xlim(-0.6, max(len(counts), 5) - 0.4)
    axes.set_yscale("log")
    axes.set_ylim(0.5, max(10, max(counts) * 4))
    axes.minorticks_off()
    axes.set_title(f"Runs of one bucket (longest {stats.longest_run}, limit {limit})")
    axes.set_xlabel("consecutive batches of one bucket")
    axes.set_ylabel("runs (logarithmic)")


def _draw_mix(axes: Axes, stats: PlanStats) -> None:
    shares = 100 * np.array(stats.mix).T
    places = np.linspace(0, 100, shares.shape[1] + 1)
    below = np.zeros(shares.shape[1])
    handles: list[Any] = []
    for bucket, colour, share in zip(stats.buckets, _shades(len(stats.buckets)), shares, strict=True):
        handles.append(axes.bar(places[:-1], share, width=np.diff(places), bottom=below, align="edge", color=colour, linewidth=0))
        below = below + share
        axes.axhline(100 * sum(b.batch_share for b in stats.buckets[: bucket.bucket + 1]), color="white", linewidth=0.8)
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 100)
    axes.set_title("Mix of the buckets over the epoch (white: its mean)")
    axes.set_xlabel("part of the epoch consumed (%)")
    axes.set_ylabel("batches (%)")
    labels = [str(bucket.bucket) for bucket in stats.buckets]
    if len(labels) <= _MOST_EDGE_LABELS:
        axes.legend(
            handles[::-1], labels[::-1], title="bucket", loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False
        )


def _label(bucket: BucketPlan) -> str:
    return f"{bucket.bucket}\n\u2264 {bucket.edge_tokens}\n{bucket.batch_share:.0%}"


def _shades(count: int) -> list[tuple[float, float, float]]:
    """Light for short, dark for long."""
    steps = np.linspace(0, 1, count) if count > 1 else np.array([0.5])
    return [tuple((_FIRST + step * (_LAST - _FIRST)).tolist()) for step in steps]
