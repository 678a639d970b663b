"""Fire drills: faults planted on purpose, what happens as it happens, and whether it was the right thing."""
