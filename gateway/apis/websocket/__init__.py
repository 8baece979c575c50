"""The WebSocket at `/v1/stream`: several streams on one connection, each a request to the routes of this gateway."""
