"""`/tokenize` and `/detokenize`: jobs that a node answers from its tokenizer, because the gateway has none."""
