"""penstock's tasks in your own Celery app: `llm = install(app)`, then `chain(llm.generate("Once upon"), other.s())`.

It needs `pip install 'penstock-llm[batch]'`. docs/CLI.md and examples/celery_chain.py show more.
"""

from penstock.producer.batch.installation import QUEUE, PenstockTasks, install
from penstock.producer.batch.tasks import text_of

__all__ = ["QUEUE", "PenstockTasks", "install", "text_of"]
