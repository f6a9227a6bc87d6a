"""Errors of the engine itself, which no request has caused."""


class EngineError(RuntimeError):
    """A step failed, and with it the requests that were part of it."""


class EngineLostError(EngineError):
    """The engine cannot go on, with any request. One that is started anew can."""
