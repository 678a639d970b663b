"""Runs side by side: what differed, how they learned, and whether one is better; decided by a statistic, not by eye."""
