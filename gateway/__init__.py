"""The HTTP gateway. `app` builds it from its parts; each API is a folder in `apis` and one row of `app.DIALECTS`.

The gateway handles bytes and backpressure, never models: it imports no tokenizer and no torch. It reaches the queue
only through `penstock.producer`.
"""

if __name__ != "penstock.gateway":
    raise ImportError(
        f"import penstock.gateway, not {__name__}: keep the repository's root off sys.path (PYTHONSAFEPATH=1)"
    )
