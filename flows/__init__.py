"""Flows: the order of the stages and their parameters; tasks hold the policies, the library does the work."""
