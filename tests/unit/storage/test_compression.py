"""Compressed streams are told by their bytes and refused when damaged; patterns match as a shell would."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.errors import StorageError
from dflash.storage.compression import _as_regex, expand, open_decompressed

CONTENT = b"".join(b"line %d of a text that packs well\n" % number for number in range(60_000))


def packed(codec: str, content: bytes) -> bytes:
    if codec == "plain":
        return content
    return gzip.compress(content, mtime=0) if codec == "gzip" else pa.Codec("zstd").compress(content).to_pybytes()


@pytest.mark.parametrize("codec", ["plain", "gzip", "zstd"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.gz", "a.zst"])
def test_the_first_bytes_decide_not_the_suffix(tmp_path: Path, codec: str, name: str) -> None:
    (tmp_path / name).write_bytes(packed(codec, CONTENT))
    chunks = list(open_decompressed(tmp_path / name))
    assert b"".join(chunks) == CONTENT
    assert all(chunks)
    assert max(map(len, chunks)) <= 1 << 20, "a stream, not the whole"


@pytest.mark.parametrize("codec", ["gzip", "zstd"])
def test_streams_end_to_end_are_one(tmp_path: Path, codec: str) -> None:
    (tmp_path / "a").write_bytes(packed(codec, b"one\n") + packed(codec, b"two\n"))
    assert b"".join(open_decompressed(tmp_path / "a")) == b"one\ntwo\n"


@pytest.mark.parametrize("codec", ["gzip", "zstd"])
@pytest.mark.parametrize("left", [0.4, 0.99])
def test_a_stream_that_is_cut_short_is_an_error_that_names_it(tmp_path: Path, codec: str, left: float) -> None:
    whole = packed(codec, CONTENT)
    (tmp_path / "a.jsonl").write_bytes(whole[: int(len(whole) * left)])
    with pytest.raises(StorageError, match=rf"a\.jsonl is a damaged or cut-off {codec} stream"):
        list(open_decompressed(tmp_path / "a.jsonl"))


def test_a_flipped_byte_is_an_error(tmp_path: Path) -> None:
    whole = bytearray(packed("gzip", CONTENT))
    whole[len(whole) // 2] ^= 0xFF
    (tmp_path / "a.gz").write_bytes(bytes(whole))
    with pytest.raises(StorageError, match=r"a\.gz"):
        list(open_decompressed(tmp_path / "a.gz"))


@pytest.mark.parametrize("content", [b"", b"x", b"\x1f"])
def test_short_files_are_plain(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    assert b"".join(open_decompressed(tmp_path / "a")) == content


class TestPatterns:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for name in ("a-1.jsonl", "a-2.jsonl", "b.json", "deep/a-3.jsonl", "deep/er/a-4.jsonl", "x[1].jsonl"):
            (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
            (tmp_path / name).write_text("x")
        (tmp_path / "a-folder.jsonl").mkdir()
        return tmp_path

    @pytest.mark.parametrize(
        ("pattern", "found"),
        [
            ("a-*.jsonl", ["a-1.jsonl", "a-2.jsonl"]),
            ("a-?.jsonl", ["a-1.jsonl", "a-2.jsonl"]),
            ("a-[2-9].jsonl", ["a-2.jsonl"]),
            ("*/a-*.jsonl", ["deep/a-3.jsonl"]),
            ("**/a-*.jsonl", ["a-1.jsonl", "a-2.jsonl", "deep/a-3.jsonl", "deep/er/a-4.jsonl"]),
            ("b.json", ["b.json"]),
            ("x[1].jsonl", ["x[1].jsonl"]),
        ],
    )
    def test_files_are_found_in_order(self, folder: Path, pattern: str, found: list[str]) -> None:
        assert expand(str(folder / pattern)) == [str(folder / name) for name in found]

    def test_a_name_stands_for_itself_and_a_pattern_must_match(self, folder: Path) -> None:
        assert expand(str(folder / "absent.jsonl")) == [str(folder / "absent.jsonl")]
        assert expand("s3://bucket/a/b.jsonl") == ["s3://bucket/a/b.jsonl"]
        with pytest.raises(StorageError, match=r"no file matches .*c-\*"):
            expand(str(folder / "c-*"))

    @pytest.mark.parametrize("name", ["s3://bucket/prefix/", "/data/prompts/"])
    def test_a_folder_is_refused_with_the_pattern_that_was_meant(self, name: str) -> None:
        with pytest.raises(StorageError, match=f"{name} names a folder") as caught:
            expand(name)
        assert f"{name}*" in caught.value.remedy


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    parts=st.lists(st.sampled_from(["a", "b", "*", "?", "**/", "/", ".", "[ab]", "[!a]"]), min_size=1, max_size=5).filter(
        lambda parts: "**" not in "".join(parts).replace("**/", "")
    ),
    name=st.lists(st.sampled_from(["a", "b", "/", ".", "c"]), min_size=1, max_size=6),
)
def test_an_objects_pattern_means_what_a_shells_does(parts: list[str], name: list[str]) -> None:
    pattern, key = "".join(parts), "".join(name)
    assert (re.fullmatch(_as_regex(pattern), key) is not None) == _matches(parts, key)


def _matches(parts: list[str], key: str) -> bool:
    """By definition, one part after the other."""
    if not parts:
        return not key
    part, rest = parts[0], parts[1:]
    if part == "*":
        stop = key.find("/") if "/" in key else len(key)
        return any(_matches(rest, key[end:]) for end in range(stop + 1))
    if part == "**/":
        starts = [0, *(place + 1 for place, sign in enumerate(key) if sign == "/")]
        folders = [start for start in starts if all(key[:start].split("/")[:-1]) or start == 0]
        return any(_matches(rest, key[start:]) for start in folders)
    single = {"?": lambda sign: sign != "/", "[ab]": lambda sign: sign in "ab", "[!a]": lambda sign: sign not in "a/"}
    takes = single.get(part, lambda sign: sign == part)
    return bool(key) and takes(key[0]) and _matches(rest, key[1:])
