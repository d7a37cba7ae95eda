"""The only package that touches the outside world: a file for each thing that is read."""


class SourceError(Exception):
    """A source could not be read. The text says what was wrong, where, and what to do."""


class FatalSourceError(SourceError):
    """Only a new process can help: the program should end with a non-zero status, so that its container is made anew."""
