"""Small data sets of known content, written through the real shard writer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dflash.data.manifest import hashes_sha256
from dflash.data.shards import ShardWriter, TokenizedSample
from dflash.records import BucketStats, DataManifest, to_json

PROMPT_HASHES = ("0" * 64, "1" * 64)


def sample(number: int, length: int) -> TokenizedSample:
    """Sample `number`: its ids and mask tell it apart from every other."""
    ids = [(number * 31 + place * 7) % 1000 for place in range(length)]
    return TokenizedSample(f"s{number}", f"kind{number % 3}", ids, [(number + place) % 3 > 0 for place in range(length)])


def data_set(folder: Path, lengths: Sequence[Sequence[int]], *, per_shard: int = 7, per_group: int = 3) -> list[TokenizedSample]:
    """Write one bucket for each list of lengths, samples of all buckets in turn; returns them in global row order."""
    writer = ShardWriter(folder, buckets=len(lengths), rows_per_shard=per_shard, rows_per_group=per_group)
    by_bucket: list[list[TokenizedSample]] = [[] for _ in lengths]
    for place in range(max(map(len, lengths))):
        for bucket, own in enumerate(lengths):
            if place < len(own):
                by_bucket[bucket].append(sample(100 * bucket + place, own[place]))
                writer.add(by_bucket[bucket][-1], bucket=bucket)
    shards = writer.close()
    (folder / "prompt_hashes.txt").write_text("".join(f"{line}\n" for line in PROMPT_HASHES))
    samples = [item for bucket in by_bucket for item in bucket]
    manifest = DataManifest(
        fingerprint="f" * 64,
        created_at="2026-01-01T00:00:00+00:00",
        source={},
        target_path="toy",
        target_fingerprint="t",
        tokenizer_sha256="k",
        template_sha256="c",
        template_flags={},
        vocab_size=1000,
        mask_token_id=1000,
        on_policy=False,
        answer_sampling={},
        samples=len(samples),
        tokens=sum(len(item.input_ids) for item in samples),
        supervised_tokens=sum(sum(item.loss_mask) for item in samples),
        max_length_tokens=64,
        quarantined={},
        prompt_hashes_sha256=hashes_sha256(PROMPT_HASHES),
        buckets=tuple(BucketStats(k, 64, len(own), sum(own), 0) for k, own in enumerate(lengths)),
        shards=shards,
    )
    (folder / "manifest.json").write_text(to_json(manifest))
    return samples
