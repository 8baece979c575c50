"""`/v1/embeddings`, `/rerank` and `/score`: one job for each text, which a node's engine embeds."""
