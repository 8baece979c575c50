"""penstock's tasks in an app of your own: a chain, and a chord over a group, beside a task of the app.

A worker runs them: `cd examples; celery -A celery_chain worker --pool threads --concurrency 32`. A worker that is
killed leaves its tasks to another. By default broker and results are in the Redis of `penstock serve`.
"""

import os
from typing import Any

from celery import Celery, chain, chord  # type: ignore[import-untyped]

from penstock import redis_url_of
from penstock.celery import install, text_of

BROKER = os.environ.get("BROKER_URL") or redis_url_of().replace("unix://", "redis+socket://", 1)
app = Celery("stories", broker=BROKER, backend=BROKER)
llm = install(app)
SHORT: dict[str, Any] = {"max_tokens": 16, "temperature": 0}


@app.task(name="stories.longest")  # type: ignore[untyped-decorator]
def longest(answers: list[dict[str, Any]]) -> str:
    """Return the longest text of several answers, which are response objects in OpenAI's form."""
    return max(map(text_of, answers), key=len)


def answer_of(task: Any) -> Any:
    """Send a task and return its result."""
    return task.delay().get(timeout=120)


if __name__ == "__main__":
    story = chain(
        llm.generate("Once upon a time", **SHORT), llm.generate_from("{previous}\n\nThe end of this story:", **SHORT)
    )
    print(text_of(answer_of(story)))
    titles = [llm.generate(f"A title for a story about {what}:", **SHORT) for what in ("rivers", "hills")]
    print(answer_of(chord(titles, app.signature("stories.longest"))))
