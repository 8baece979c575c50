"""`/tokenize`, `/detokenize`, `/v1/embeddings`, `/rerank` and `/score`: jobs that a node answers without generating."""
