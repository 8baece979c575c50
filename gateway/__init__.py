"""The HTTP door: the OpenAI API and its streams.

It knows bytes and pressure, never models: no tokenizer, no torch. It talks to the queue through
`penstock.producer` only.
"""

if __name__ != "penstock.gateway":
    raise ImportError(
        f"import penstock.gateway, not {__name__}: keep the repository's root off sys.path (PYTHONSAFEPATH=1)"
    )
