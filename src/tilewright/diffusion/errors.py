"""Errors that whoever runs a pipeline in a process of its own handles. Imports no torch."""


class DiffusionLostError(RuntimeError):
    """A rank ended, hangs or failed alone: the others cannot go on without it."""
