"""The model room: frozen target, drafter, anchors, loss, generation, export.

Nothing is imported here: `parameters` is arithmetic that a command may need without waiting for torch.
"""
