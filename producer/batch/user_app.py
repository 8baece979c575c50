"""What penstock's tasks need of the settings of a user's Celery app, checked before a task can be lost.

A worker removes a message in a format that its app does not accept, and only writes a line into its log. So a caller
never gets an answer.
"""

from __future__ import annotations

from typing import Any

from celery import Celery
from kombu.serialization import registry

from penstock.contract.errors import ConfigError

SERIALIZER = "json"
"""The format of penstock's tasks, whatever `task_serializer` says."""


def check_formats(app: Celery) -> None:
    """Raise ConfigError, which says what to set, if a worker would drop the tasks or no caller could read a result."""
    conf = app.conf
    if not _accepts(conf.accept_content, SERIALIZER):
        shown = _in_words(conf.accept_content)
        raise ConfigError(
            f"accept_content: penstock's tasks are JSON, and this Celery app accepts only {shown}, so its workers "
            f"would drop them; set accept_content to {_with(conf.accept_content, SERIALIZER)} for callers and workers",
            param="accept_content",
        )
    if not conf.result_backend:
        return
    name = "accept_content" if conf.result_accept_content is None else "result_accept_content"
    accepted, written = conf[name], conf.result_serializer
    if not _accepts(accepted, written):
        raise ConfigError(
            f"{name}: this Celery app writes results as {written} (result_serializer) and reads only "
            f"{_in_words(accepted)}, so no caller could read an answer; set {name} to {_with(accepted, written)}, or "
            "result_serializer to one of them",
            param=name,
        )


def check_visibility_timeout(app: Celery, lease_s: float) -> None:
    """Raise ConfigError if a Redis broker would queue a task again before its worker renews the task's lease."""
    timeout_s = app.conf.broker_transport_options.get("visibility_timeout")
    if timeout_s is None or timeout_s >= lease_s:
        return
    if app.connection_for_read().transport.driver_type == "redis":
        raise ConfigError(
            f"broker_transport_options: visibility_timeout is {timeout_s:g} s. The lease of penstock's tasks is "
            f"longer ({lease_s:g} s), so Celery would start running tasks again and again. Set visibility_timeout to "
            f"at least {lease_s:g}, or PENSTOCK_CELERY_TASK_LEASE_S to at most {timeout_s:g}",
            param="broker_transport_options",
        )


def declared_queue(app: Celery, name: str) -> Any:
    """Return the queue of penstock's tasks. An app with `task_create_missing_queues=False` gets this queue too."""
    queues: Any = app.amqp.queues
    if name not in queues:
        queues.add(queues.new_missing(name))
    return queues[name]


def _accepts(accepted: Any, serializer: str) -> bool:
    if accepted is None:
        return True
    types = [registry.name_to_type.get(name, name) for name in (serializer, *accepted)]
    return types[0] in types[1:]


def _in_words(accepted: Any) -> str:
    return ", ".join(sorted(map(str, accepted)))


def _with(accepted: Any, serializer: str) -> str:
    return str([*sorted(map(str, accepted)), serializer])
