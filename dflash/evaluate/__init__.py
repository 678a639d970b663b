"""Lossless decoding, acceptance metrics, prompt sets, and tables of results."""
