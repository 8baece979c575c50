"""The jobs API over HTTP: submit, show, stream, cancel and list jobs. It uses no Redis, model or tokenizer."""
