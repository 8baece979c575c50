"""Recognition of environment variables that Kubernetes injects for a namespace's services, such as `penstock-gateway`.

Their names begin like our settings. https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
"""

from __future__ import annotations

import re

_SERVICE = r"(?:[A-Z0-9_]+_)?"
"""The rest of a service's name after our prefix: empty for `penstock-node`, METRICS_ for `penstock-node-metrics`."""
_PROTOCOL = r"(?:TCP|UDP|SCTP)"
_NUMBER = re.compile(r"\d{1,5}")
_ADDRESS = re.compile(r"[0-9A-Fa-f.:]+")
_ORIGIN = re.compile(r"(?:tcp|udp|sctp)://\S+")
_FORMS = tuple(
    (re.compile(_SERVICE + name), value)
    for name, value in (
        (r"SERVICE_HOST", _ADDRESS),
        (r"SERVICE_PORT(?:_[A-Z0-9_]+)?", _NUMBER),
        (r"PORT", _ORIGIN),
        (rf"PORT_\d+_{_PROTOCOL}", _ORIGIN),
        (rf"PORT_\d+_{_PROTOCOL}_PROTO", re.compile(r"tcp|udp|sctp")),
        (rf"PORT_\d+_{_PROTOCOL}_PORT", _NUMBER),
        (rf"PORT_\d+_{_PROTOCOL}_ADDR", _ADDRESS),
    )
)


def is_injected(name: str, value: str) -> bool:
    """Return whether a variable looks injected by Kubernetes. `name` is the part after the prefix of our settings.

    The value distinguishes ports: Kubernetes sets PENSTOCK_GATEWAY_PORT to `tcp://10.0.0.1:8000`, an operator to
    `8000`.
    """
    return any(form.fullmatch(name) and known.fullmatch(value) for form, known in _FORMS)
