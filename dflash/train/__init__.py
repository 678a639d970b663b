"""Training: the replica's pipeline, the step, the run log, and the supervisor above it.

Kept empty of imports: the launcher and the progress reader must not pay for torch.
"""
