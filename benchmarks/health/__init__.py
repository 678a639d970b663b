"""The scoring bench of the health check: labelled simulated runs, what was said of them, and how right that was."""
