"""The node: an engine that turns prompts into tokens, and the service that feeds it from Redis.

`engine/` schedules (no Redis, no torch), `model/` computes (torch, no Redis), the modules beside them talk to Redis.
Import it as `penstock.gpu_node`; importing it by its bare name would create a second set of classes.
"""

if __name__ != "penstock.gpu_node":
    raise ImportError("import this package as penstock.gpu_node; the clone's root must not be on sys.path")
