"""A chain of two Celery tasks: the second prompt is made of the first answer.

A worker runs both: `cd examples; celery -A celery_chain worker`. A worker that is killed leaves its task to another.
"""

from typing import Any

from penstock.producer.batch.app import app

GENERATE = "penstock.generate"
ASK_AGAIN = "examples.ask_again"


@app.task(name=ASK_AGAIN, bind=True)  # type: ignore[untyped-decorator]
def ask_again(self: Any, answer: dict[str, Any]) -> Any:
    """Replace itself by a task that continues from the first answer, a response object in OpenAI's form."""
    story = answer["choices"][0]["text"]
    options = {"prompt": f"{story}\n\nThe end of this story:", "max_tokens": 16, "temperature": 0}
    return self.replace(app.signature(GENERATE, kwargs=options))


if __name__ == "__main__":
    first = app.signature(GENERATE, kwargs={"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0})
    response = (first | app.signature(ASK_AGAIN)).delay().get(timeout=120)
    print(response["choices"][0]["text"])
