"""When and how a node sends the tokens of running jobs to Redis. No models here."""
