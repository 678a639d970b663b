"""From conversations to tokens, loss masks, length-bucketed Parquet, and a batch plan.

Nothing is imported here: the synthetic generator must stay importable without transformers and pyarrow.
"""
