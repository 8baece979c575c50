"""A Django site whose view sends a task of Celery to penstock, and another view that reads the answer.

`cd examples; celery -A django_app worker --pool threads` and `python django_app.py runserver 8080` run it beside
`penstock serve`. A real project has the settings in `settings.py` and the tasks in `celery.py`; the lines are the same.
"""

import os
import sys
from typing import Any

from celery import Celery  # type: ignore[import-untyped]
from django.conf import settings
from django.core.management import execute_from_command_line
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from penstock import redis_url_of
from penstock.celery import install, text_of

BROKER = os.environ.get("BROKER_URL") or redis_url_of().replace("unix://", "redis+socket://", 1)
settings.configure(
    ROOT_URLCONF=__name__,
    SECRET_KEY=os.environ.get("SECRET_KEY", "only for this example"),
    ALLOWED_HOSTS=["127.0.0.1", "localhost"],
    CELERY_BROKER_URL=BROKER,
    CELERY_RESULT_BACKEND=BROKER,
)
tasks = Celery("django_app")
tasks.config_from_object(settings, namespace="CELERY")
llm = install(tasks)


@csrf_exempt  # a form of your site sends the token instead
@require_POST
def describe(request: HttpRequest) -> JsonResponse:
    """Send the work and answer at once. The task waits in Redis while no worker or node has time."""
    product = request.POST.get("product", "")
    if not 0 < len(product) <= 200:
        return JsonResponse({"error": "product: it needs 1 to 200 characters"}, status=400)
    task = llm.generate(f"A sentence about {product}:", max_tokens=16, temperature=0).delay()
    return JsonResponse({"task": task.id}, status=202)


def answer(_request: HttpRequest, task: str) -> JsonResponse:
    found: Any = tasks.AsyncResult(task)
    if found.failed():
        return JsonResponse({"error": str(found.result)}, status=502)
    return JsonResponse({"state": found.state, "text": text_of(found.result) if found.successful() else None})


urlpatterns = [path("describe", describe), path("answers/<task>", answer)]
application = get_wsgi_application()

if __name__ == "__main__":
    execute_from_command_line(sys.argv)
