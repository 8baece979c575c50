"""One module an engine, each the main of a run's process in that engine's own environment; see `bench.child`.

Nothing but the standard library and the engine itself is imported, and the engine only inside `open_session`.
"""
