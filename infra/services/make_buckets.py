"""Buckets of the S3-compatible store: those that are named and missing are made, none is ever emptied or removed."""

from __future__ import annotations

import sys

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

MISSING = {"404", "NoSuchBucket", "NotFound"}
ALREADY_THERE = {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}


def make_buckets(names: list[str]) -> list[str]:
    """Make the buckets that are missing at the endpoint that the environment names; returns what was done, a line each."""
    client = boto3.client("s3", config=Config(connect_timeout=5, read_timeout=10, retries={"max_attempts": 5}))
    done = []
    for name in names:
        try:
            client.head_bucket(Bucket=name)
        except ClientError as error:
            if error.response["Error"]["Code"] not in MISSING:
                raise
        else:
            done.append(f"bucket {name} is there")
            continue
        try:
            client.create_bucket(Bucket=name)
        except ClientError as error:  # made by somebody else in between
            if error.response["Error"]["Code"] not in ALREADY_THERE:
                raise
        done.append(f"bucket {name} made")
    return done


if __name__ == "__main__":
    print("\n".join(make_buckets(sys.argv[1:])))
