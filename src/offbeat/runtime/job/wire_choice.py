"""Check the choices of a wire format, of ``--plane`` and of ``--replicas``: whether they exist, and whether a rule can use them."""

from __future__ import annotations

from typing import TypeVar

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.policy import Policy, ServerRule
from offbeat.errors import ConfigurationError
from offbeat.types import PLANES, WIRE_FORMATS, PlaneChoice, WireFormat

T = TypeVar("T", bound=str)


def wire_format(name: str) -> WireFormat:
    """Return the format of this name.

    Raises:
        ConfigurationError: there is none.

    >>> wire_format("bf16")
    'bf16'
    """
    return _known(name, WIRE_FORMATS, f"wire={name!r}")


def plane_choice(name: str) -> PlaneChoice:
    """Return the choice of ``--plane`` of this name. Raises `ConfigurationError` if there is none."""
    return _known(name, PLANES, f"--plane {name}")


def _known(name: str, values: tuple[T, ...], given: str) -> T:
    for known in values:
        if name == known:
            return known
    raise ConfigurationError(f"{given}: must be one of {', '.join(values)}")


def check_plane(policy: Policy, plane: PlaneChoice) -> None:
    """Check that a job under this rule can use this memory.

    Raises:
        ConfigurationError: it cannot; the message says why.

    >>> from offbeat.policies import rule
    >>> check_plane(rule("bsp"), "device")
    >>> check_plane(rule("majority"), "device")
    Traceback (most recent call last):
    ...
    offbeat.errors.ConfigurationError: --plane device: majority has no servers, and its ranks sum in the host's memory; leave --plane out
    """
    if plane == "device" and not isinstance(policy, ServerRule):
        raise ConfigurationError(
            f"--plane device: {policy.called()} has no servers, and its ranks sum in the host's memory; leave --plane out"
        )


def check_rule(policy: Policy, wire: WireFormat) -> None:
    """Check that a job under this rule can use this format.

    Raises:
        ConfigurationError: it cannot; the message says why.

    >>> from offbeat.policies import rule
    >>> check_rule(rule("bsp"), "int8")
    >>> check_rule(rule("majority"), "int8")
    Traceback (most recent call last):
    ...
    offbeat.errors.ConfigurationError: wire='int8': majority has no servers, and its ranks exchange float32 only; leave wire out
    """
    if wire == "float32":
        return
    name = policy.called()
    if not isinstance(policy, ServerRule):
        raise ConfigurationError(f"wire={wire!r}: {name} has no servers, and its ranks exchange float32 only; leave wire out")
    if policy.averaging is not None and policy.scope == "job":
        raise ConfigurationError(
            f"wire={wire!r}: under {name} workers push parameters, which travel as float32 only; leave wire out, or use a rule that pushes "
            "gradients or fragments (diloco, decoupled)"
        )
    if policy.scope == "shard" and policy.averaging is None:
        raise ConfigurationError(
            f"wire={wire!r}: under {name} each shard decides for itself, and its blocks travel as float32 only; leave wire out"
        )


def check_replicas(policy: Policy) -> None:
    """Check that under this rule the servers can have standbys.

    Raises:
        ConfigurationError: they cannot; the message says why.

    >>> from offbeat.policies import rule
    >>> check_replicas(rule("bsp"))
    >>> check_replicas(rule("majority"))
    >>> check_replicas(rule("dpsgd"))
    Traceback (most recent call last):
    ...
    offbeat.errors.ConfigurationError: --replicas 1: dpsgd mixes parameters, and no standby follows that; leave --replicas out
    """
    if not isinstance(policy, ServerRule | RoundRule):
        raise ConfigurationError(f"--replicas 1: {policy.called()} mixes parameters, and no standby follows that; leave --replicas out")
