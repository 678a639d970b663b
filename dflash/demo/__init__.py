"""The demo's target: a tiny Qwen3 chat model shipped as package data, and the code that builds it from nothing."""
