"""The OpenAI-compatible HTTP server: plain ASGI, no framework."""
