"""The few exceptions. A worker's death is an event, never an exception: an exception means a mistake or an impossible request."""

from __future__ import annotations


class OffbeatError(Exception):
    """The base of what this package raises on purpose."""


class ConfigurationError(OffbeatError, ValueError):
    """The user asked for something impossible; the message names the value, the rule it breaks and what to change."""


class ProtocolError(OffbeatError):
    """A peer broke the wire protocol: a message of the wrong size, from a wrong version, or without the job's token."""


class RefusedError(OffbeatError):
    """The job does not take this worker: a wrong token, or a model that differs from the job's."""


class JobError(OffbeatError):
    """The job cannot go on; the message says why in one sentence."""
